"""Dense layers that are sharded over the ranks of an axis."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from commlib.sharding.axis import AxisRanks, ParallelAxis
from commlib.sharding.sharding import Sharding, parts_of
from commlib.tensor_parallel import moves
from commlib.tensor_parallel.styles import Column, Row, Vocabulary
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
from commlib_tensorflow.tensor._values import broadcast_rank_0_values
from commlib_tensorflow.tensor.moves import axis_of, redistribute


@keras.saving.register_keras_serializable("commlib")
class ColumnDense(ShardedLayer, keras.layers.Dense):  # type: ignore[misc]  # Keras has no types
    """A dense layer with sharded units: each rank has some columns of the kernel.

    Like `keras.layers.Dense(units)`, with rank 0's initial values. inputs: (..., features), unsharded on every rank, or
    sharded along `sequence`. Returns (..., this rank's units), or all with `gather`. Other arguments: see
    `commlib.tensor_parallel.Column`. Shapes that Keras infers for models are unsharded.

    Args:
        units: The number of outputs.
        ranks: The ranks of the axis, such as `mesh["tp"]`.
        style: How the layer is sharded: see `commlib.tensor_parallel`.
        **kwargs: Arguments of the layer that is sharded.
    """

    def __init__(self, units: int, ranks: AxisRanks, *, style: Column | None = None, **kwargs: Any) -> None:
        super().__init__(units, **kwargs)
        self._given: Any = axis_of(ranks, "ColumnDense"), style or Column()

    def build(self, input_shape: Any) -> None:
        """Create the weights as a plain layer does, and keep this rank's shard. Collective."""
        super().build(input_shape)
        broadcast_rank_0_values(self.name, self.variables, self._given[0].comm)
        self.become(self.path or self.name, *self._given)
        self.compare("built")

    def shardings(self, what: str, style: Column) -> Shardings:
        """Return the sharding of its variables; `self` may be a plain layer. Raises UsageError if impossible."""
        check_plain(what, self, style)
        check_elementwise(what, self.activation, style, self.units)
        parts, shape = parts_of(what, style.parts, self.units), whole_shape(self._kernel)
        shardings = [(self._kernel, Sharding(shape, 1, parts, style.units, shared=style.shares))]
        if self.bias is not None:
            shardings.append((self.bias, Sharding(shape[1:], 0, parts, style.units, shared=style.shares)))
        return [*shardings, *sharded_factors(self, shardings[0][1])]

    def call(self, inputs: Any, training: Any = None) -> Any:
        """Return this rank's units, or all of them."""
        x = enter(self, inputs, self.axis, self.style.sequence)
        x = keras.ops.matmul(x, self.shared_kernel)
        if self.bias is not None:
            x = x + tf.cast(sum_shared_gradient(self.sharers, self.bias, 0), x.dtype)
        if self.style.gather:
            x = gather_outputs(x, self.axis, self.sharding, layer=self)
        return x if self.activation is None else self.activation(x)

    def compute_mask(self, inputs: Any, previous_mask: Any) -> Any:
        """Return the mask of the output."""
        return gather_mask(previous_mask, self.axis, self.style.sequence, len(inputs.shape))


@keras.saving.register_keras_serializable("commlib")
class VocabularyDense(ColumnDense):
    """The layer that computes logits, sharded by vocabulary: like `ColumnDense`, for the style `Vocabulary`.

    Returns (..., this rank's tokens), for `vocabulary_cross_entropy`, or all with `gather`.

    Args:
        units: The number of outputs.
        ranks: The ranks of the axis, such as `mesh["tp"]`.
        style: How the layer is sharded: see `commlib.tensor_parallel`.
        **kwargs: Arguments of the layer that is sharded.
    """

    def __init__(self, units: int, ranks: AxisRanks, *, style: Vocabulary | None = None, **kwargs: Any) -> None:
        keras.layers.Dense.__init__(self, units, **kwargs)
        self._given: Any = axis_of(ranks, "VocabularyDense"), style or Vocabulary()

    def shardings(self, what: str, style: Column | Vocabulary) -> Shardings:
        """Return the sharding of its variables; `self` may be a plain layer. Raises UsageError if impossible."""
        return ColumnDense.shardings(self, what, Column(gather=style.gather))

    def become(self, what: str, axis: ParallelAxis, style: Column | Vocabulary) -> None:
        """Shard a plain layer in place."""
        super().become(what, axis, Column(gather=style.gather, sequence=style.sequence))


@keras.saving.register_keras_serializable("commlib")
class RowDense(ShardedLayer, keras.layers.Dense):  # type: ignore[misc]  # Keras has no types
    """A dense layer with sharded inputs: each rank has some rows of the kernel, and outputs are summed.

    Like `keras.layers.Dense(units)`, with rank 0's initial values. inputs: (..., this rank's features), or all with
    `split`. Returns (..., units), unsharded on every rank or sharded along `sequence`.

    Args:
        units: The number of outputs.
        ranks: The ranks of the axis, such as `mesh["tp"]`.
        features: The number of inputs of the unsharded layer, by default as Keras infers it.
        style: How the layer is sharded: see `commlib.tensor_parallel`.
        **kwargs: Arguments of the layer that is sharded.
    """

    def __init__(
        self, units: int, ranks: AxisRanks, *, features: int | None = None, style: Row | None = None, **kwargs: Any
    ) -> None:
        super().__init__(units, **kwargs)
        self._given, self._features = (axis_of(ranks, "RowDense"), style or Row()), features

    def build(self, input_shape: Any) -> None:
        """Create the weights as a plain layer does, and keep this rank's shard. Collective."""
        super().build((*input_shape[:-1], self._features or input_shape[-1]))
        broadcast_rank_0_values(self.name, self.variables, self._given[0].comm)
        self.become(self.path or self.name, *self._given)
        self.compare("built")

    def shardings(self, what: str, style: Row) -> Shardings:
        """Return the sharding of its variables; `self` may be a plain layer. Raises UsageError if impossible."""
        check_plain(what, self, style)
        sharding = Sharding(whole_shape(self._kernel), 0, (), style.units)
        return [(self._kernel, sharding), *sharded_factors(self, sharding)]

    def become(self, what: str, axis: ParallelAxis, style: Row) -> None:
        """Shard a plain layer in place."""
        super().become(what, axis, style)
        self.input_spec = keras.layers.InputSpec(min_ndim=2)  # actual inputs are shorter than Keras has recorded

    def call(self, inputs: Any, training: Any = None) -> Any:
        """Return the outputs, unsharded or this rank's shard of the sequence."""
        axis, x = self.axis, inputs
        if self.style.split:
            note_input(axis, self, x)
            x = redistribute(x, axis, moves.scatter(-1, self.sharding.lengths(axis.size)))
        check_inputs(self, x, -1)
        x = add_up(self, keras.ops.matmul(x, self.kernel), self.bias, self.style.sequence)
        return x if self.activation is None else self.activation(x)

    def compute_mask(self, inputs: Any, previous_mask: Any) -> Any:
        """Return the mask of the output."""
        return scatter_mask(previous_mask, self.axis, self.style.sequence, len(inputs.shape))
