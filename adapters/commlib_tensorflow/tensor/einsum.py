"""Einsum layers that are divided among the ranks of an axis: such as the projections of attention, by heads."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from commlib.errors import UsageError
from commlib.sharding.axis import Axis
from commlib.sharding.sharding import Sharding, parts_of
from commlib.tensor_parallel import moves
from commlib.tensor_parallel.einsum import Einsum
from commlib.tensor_parallel.styles import Column, Row
from commlib_tensorflow._shards import whole_shape
from commlib_tensorflow.tensor._alike import given
from commlib_tensorflow.tensor._divided import (
    OwnVariables,
    added_up,
    check_elementwise,
    check_inputs,
    check_plain,
)
from commlib_tensorflow.tensor._dividing import Shardings, divide
from commlib_tensorflow.tensor._entering import entered
from commlib_tensorflow.tensor._gathering import gathered
from commlib_tensorflow.tensor._lora import divided_factors
from commlib_tensorflow.tensor._masks import gathered_mask, scattered_mask
from commlib_tensorflow.tensor._sharing import for_sharers
from commlib_tensorflow.tensor.moves import copy, moved


class ColumnEinsumDense(OwnVariables, keras.layers.EinsumDense):  # type: ignore[misc]  # Keras has no types
    """An einsum layer of which one output dimension is divided: the first of the kernel's, such as d of abc,cde->abde.

    inputs: whole on every rank, or divided along `sequence`. Returns this rank's part of the outputs, or all of them
    with `gather`. Other arguments: see `commlib.tensor_parallel.Column`.
    """

    enters = True
    """Its input has to be moved into what is divided; attention does that once for several layers."""

    def shardings(self, what: str, style: Column) -> Shardings:
        """Return how its variables are divided; `self` may be an ordinary layer. Raises UsageError if it cannot be."""
        check_plain(what, self, style)
        equation = Einsum.of(what, self.equation)
        if not equation.columns:
            raise UsageError(
                f"plan: {what}: no dimension of its kernel is an output of {self.equation!r}: leave it whole"
            )
        place = equation.columns[0]
        shape = whole_shape(self._kernel)
        if place.outside in (-1, len(equation.outputs) - 1):
            check_elementwise(what, self.activation, style, shape[place.kernel])
        parts = parts_of(what, style.parts, shape[place.kernel])
        found = [(self._kernel, Sharding(shape, place.kernel, parts, style.units, shared=style.shares))]
        if self.bias is not None and (dim := equation.bias(place.letter, self.bias_axes)) is not None:
            own = Sharding(whole_shape(self.bias), dim, parts, style.units, shared=style.shares)
            found.append((self.bias, own))
        return [*found, *divided_factors(self, found[0][1])]

    def become(self, what: str, axis: Axis, style: Column) -> None:
        """Divide what is an ordinary layer so far."""
        shardings = self.shardings(what, style)
        divide(what, axis, shardings)
        self.supports_jit = False
        self.keep(what, axis, style, shardings[0][1])
        self.dim = Einsum.of(what, self.equation).columns[0].outside
        self.bias_dim = next((sharding.dim for variable, sharding in shardings if variable is self.bias), None)

    def call(self, inputs: Any, training: Any = None) -> Any:
        """Return this rank's outputs, or all of them."""
        x = entered(self, inputs, self.axis, self.style.sequence) if self.enters else inputs
        x = keras.ops.einsum(self.equation, x, self.shared_kernel)
        if self.bias is not None:
            # What all parts of the output share has a part of its gradient on each rank.
            bias_dim = self.bias_dim
            bias = copy(self.bias, self.axis) if bias_dim is None else for_sharers(self.sharers, self.bias, bias_dim)
            x = x + tf.cast(bias, x.dtype)
        if self.style.gather:
            x = gathered(x, self.axis, self.sharding, self.dim, layer=self)
        return x if self.activation is None else self.activation(x)

    def compute_mask(self, inputs: Any, previous_mask: Any) -> Any:
        """Return the mask of the output."""
        return gathered_mask(previous_mask, self.axis, self.style.sequence, len(inputs.shape))


class RowEinsumDense(OwnVariables, keras.layers.EinsumDense):  # type: ignore[misc]  # Keras has no types
    """An einsum layer whose input is divided where products are added up, such as c of abcd,cde->abe: the first such.

    inputs: this rank's part, or the whole with `split`. Returns the outputs, whole on every rank or divided along
    `sequence`.
    """

    def shardings(self, what: str, style: Row) -> Shardings:
        """Return how its variables are divided; `self` may be an ordinary layer. Raises UsageError if it cannot be."""
        check_plain(what, self, style)
        rows = Einsum.of(what, self.equation).rows
        if not rows:
            raise UsageError(f"plan: {what}: {self.equation!r} adds up no dimension of its kernel: leave it whole")
        found = Sharding(whole_shape(self._kernel), rows[0].kernel, (), style.units)
        return [(self._kernel, found), *divided_factors(self, found)]

    def become(self, what: str, axis: Axis, style: Row) -> None:
        """Divide what is an ordinary layer so far."""
        shardings = self.shardings(what, style)
        divide(what, axis, shardings)
        self.supports_jit = False
        self.keep(what, axis, style, shardings[0][1])
        self.dim = Einsum.of(what, self.equation).rows[0].outside

    def call(self, inputs: Any, training: Any = None) -> Any:
        """Return the outputs, whole or this rank's part of the sequence."""
        axis, x = self.axis, inputs
        if self.style.split:
            given(axis, self, x)
            x = moved(x, axis, moves.scatter(self.dim, self.sharding.lengths(axis.size)))
        check_inputs(self, x, self.dim)
        x = added_up(self, keras.ops.einsum(self.equation, x, self.kernel), self.bias, self.style.sequence)
        return x if self.activation is None else self.activation(x)

    def compute_mask(self, inputs: Any, previous_mask: Any) -> Any:
        """Return the mask of the output."""
        return scattered_mask(previous_mask, self.axis, self.style.sequence, len(inputs.shape))
