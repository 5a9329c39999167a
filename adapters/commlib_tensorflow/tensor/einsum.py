"""Einsum layers that are sharded over the ranks of an axis: such as the projections of attention, by heads."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from commlib.errors import UsageError
from commlib.sharding.axis import ParallelAxis
from commlib.sharding.sharding import Sharding, parts_of
from commlib.tensor_parallel import moves
from commlib.tensor_parallel.einsum import Einsum
from commlib.tensor_parallel.styles import Column, Row
from commlib_tensorflow._shards import whole_shape
from commlib_tensorflow.tensor._comparison import note_input
from commlib_tensorflow.tensor._gathering import gather_outputs
from commlib_tensorflow.tensor._input_cache import enter
from commlib_tensorflow.tensor._lora import sharded_factors
from commlib_tensorflow.tensor._masks import gather_mask, scatter_mask
from commlib_tensorflow.tensor._sharded_layer import (
    ShardedLayer,
    add_up,
    check_elementwise,
    check_inputs,
    check_plain,
)
from commlib_tensorflow.tensor._sharding import Shardings
from commlib_tensorflow.tensor._shared_weights import sum_shared_gradient
from commlib_tensorflow.tensor.moves import copy, redistribute


class ColumnEinsumDense(ShardedLayer, keras.layers.EinsumDense):  # type: ignore[misc]  # Keras has no types
    """An einsum layer with one sharded output dimension: the kernel's first, such as d of abc,cde->abde.

    inputs: unsharded on every rank, or sharded along `sequence`. Returns this rank's shard of the outputs, or all of
    them with `gather`. Arguments are those of `keras.layers.EinsumDense`.
    """

    enters = True
    """Whether it moves its input itself; attention does that once for several layers."""

    def shardings(self, what: str, style: Column) -> Shardings:
        """Return the sharding of its variables; `self` may be a plain layer. Raises UsageError if impossible."""
        check_plain(what, self, style)
        equation = Einsum.of(what, self.equation)
        if not equation.columns:
            raise UsageError(
                f"plan: {what}: no dimension of its kernel is an output of {self.equation!r}: leave it unsharded"
            )
        place = equation.columns[0]
        shape = whole_shape(self._kernel)
        if place.outside in (-1, len(equation.outputs) - 1):
            check_elementwise(what, self.activation, style, shape[place.kernel])
        parts = parts_of(what, style.parts, shape[place.kernel])
        shardings = [(self._kernel, Sharding(shape, place.kernel, parts, style.units, shared=style.shares))]
        if self.bias is not None and (dim := equation.bias(place.letter, self.bias_axes)) is not None:
            own = Sharding(whole_shape(self.bias), dim, parts, style.units, shared=style.shares)
            shardings.append((self.bias, own))
        return [*shardings, *sharded_factors(self, shardings[0][1])]

    def become(self, what: str, axis: ParallelAxis, style: Column) -> None:
        """Shard a plain layer in place."""
        shardings = self.shardings(what, style)
        super().become(what, axis, style)
        self.dim = Einsum.of(what, self.equation).columns[0].outside
        self.bias_dim = next((sharding.dim for variable, sharding in shardings if variable is self.bias), None)

    def call(self, inputs: Any, training: Any = None) -> Any:
        """Return this rank's outputs, or all of them."""
        x = enter(self, inputs, self.axis, self.style.sequence) if self.enters else inputs
        x = keras.ops.einsum(self.equation, x, self.shared_kernel)
        if self.bias is not None:
            # A bias shared by all shards of the output has a part of its gradient on each rank.
            bias_dim = self.bias_dim
            bias = (
                copy(self.bias, self.axis)
                if bias_dim is None
                else sum_shared_gradient(self.sharers, self.bias, bias_dim)
            )
            x = x + tf.cast(bias, x.dtype)
        if self.style.gather:
            x = gather_outputs(x, self.axis, self.sharding, self.dim, layer=self)
        return x if self.activation is None else self.activation(x)

    def compute_mask(self, inputs: Any, previous_mask: Any) -> Any:
        """Return the mask of the output."""
        return gather_mask(previous_mask, self.axis, self.style.sequence, len(inputs.shape))


class RowEinsumDense(ShardedLayer, keras.layers.EinsumDense):  # type: ignore[misc]  # Keras has no types
    """An einsum layer sharded along a summed input dimension, the first one, such as c of abcd,cde->abe.

    inputs: this rank's shard, or all with `split`. Returns the outputs, unsharded on every rank or sharded along
    `sequence`.
    Arguments are those of `keras.layers.EinsumDense`.
    """

    def shardings(self, what: str, style: Row) -> Shardings:
        """Return the sharding of its variables; `self` may be a plain layer. Raises UsageError if impossible."""
        check_plain(what, self, style)
        rows = Einsum.of(what, self.equation).rows
        if not rows:
            raise UsageError(f"plan: {what}: {self.equation!r} sums no dimension of its kernel: leave it unsharded")
        sharding = Sharding(whole_shape(self._kernel), rows[0].kernel, (), style.units)
        return [(self._kernel, sharding), *sharded_factors(self, sharding)]

    def become(self, what: str, axis: ParallelAxis, style: Row) -> None:
        """Shard a plain layer in place."""
        super().become(what, axis, style)
        self.dim = Einsum.of(what, self.equation).rows[0].outside

    def call(self, inputs: Any, training: Any = None) -> Any:
        """Return the outputs, unsharded or this rank's shard of the sequence."""
        axis, x = self.axis, inputs
        if self.style.split:
            note_input(axis, self, x)
            x = redistribute(x, axis, moves.scatter(self.dim, self.sharding.lengths(axis.size)))
        check_inputs(self, x, self.dim)
        x = add_up(self, keras.ops.einsum(self.equation, x, self.kernel), self.bias, self.style.sequence)
        return x if self.activation is None else self.activation(x)

    def compute_mask(self, inputs: Any, previous_mask: Any) -> Any:
        """Return the mask of the output."""
        return scatter_mask(previous_mask, self.axis, self.style.sequence, len(inputs.shape))
