"""Dense layers that are divided among the ranks of an axis."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from commlib.sharding.axis import Axis
from commlib.sharding.sharding import Sharding, parts_of
from commlib.tensor_parallel import moves
from commlib.tensor_parallel.styles import Column, Row, Vocabulary
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
from commlib_tensorflow.tensor._values import take_values_of_rank_0
from commlib_tensorflow.tensor.moves import On, axis_of, moved


@keras.saving.register_keras_serializable("commlib")
class ColumnDense(OwnVariables, keras.layers.Dense):  # type: ignore[misc]  # Keras has no types
    """A dense layer whose units are divided: each rank has some columns of the kernel.

    As `keras.layers.Dense(units)`, with the values that this has on rank 0. inputs: (..., features), whole on every
    rank, or divided along `sequence`. Returns (..., this rank's units), or all with `gather`. Other arguments: see
    `commlib.tensor_parallel.Column`. The shapes that Keras infers for models are those of the whole.
    """

    def __init__(self, units: int, axis: On, *, style: Column | None = None, **kwargs: Any) -> None:
        super().__init__(units, **kwargs)
        self._given: Any = axis_of(axis), style or Column()

    def build(self, input_shape: Any) -> None:
        """Make the weights as an ordinary layer does, and keep this rank's part. Collective."""
        super().build(input_shape)
        take_values_of_rank_0(self.name, self.variables, self._given[0].comm)
        self.become(self.path or self.name, *self._given)
        self.compare("built")

    def shardings(self, what: str, style: Column) -> Shardings:
        """Return how its variables are divided; `self` may be an ordinary layer. Raises UsageError if it cannot be."""
        check_plain(what, self, style)
        check_elementwise(what, self.activation, style, self.units)
        parts, shape = parts_of(what, style.parts, self.units), whole_shape(self._kernel)
        found = [(self._kernel, Sharding(shape, 1, parts, style.units, shared=style.shares))]
        if self.bias is not None:
            found.append((self.bias, Sharding(shape[1:], 0, parts, style.units, shared=style.shares)))
        return [*found, *divided_factors(self, found[0][1])]

    def become(self, what: str, axis: Axis, style: Column) -> None:
        """Divide what is an ordinary layer so far."""
        shardings = ColumnDense.shardings(self, what, style)
        divide(what, axis, shardings)
        self.supports_jit = False
        self.keep(what, axis, style, shardings[0][1])

    def call(self, inputs: Any, training: Any = None) -> Any:
        """Return this rank's units, or all of them."""
        x = entered(self, inputs, self.axis, self.style.sequence)
        x = keras.ops.matmul(x, self.shared_kernel)
        if self.bias is not None:
            x = x + tf.cast(for_sharers(self.sharers, self.bias, 0), x.dtype)
        if self.style.gather:
            x = gathered(x, self.axis, self.sharding, layer=self)
        return x if self.activation is None else self.activation(x)

    def compute_mask(self, inputs: Any, previous_mask: Any) -> Any:
        """Return the mask of the output."""
        return gathered_mask(previous_mask, self.axis, self.style.sequence, len(inputs.shape))


@keras.saving.register_keras_serializable("commlib")
class VocabularyDense(ColumnDense):
    """The layer that makes logits, divided by words: as `ColumnDense`, for the style `Vocabulary`.

    Returns (..., this rank's words), for `vocabulary_cross_entropy`, or all with `gather`.
    """

    def __init__(self, units: int, axis: On, *, style: Vocabulary | None = None, **kwargs: Any) -> None:
        keras.layers.Dense.__init__(self, units, **kwargs)
        self._given: Any = axis_of(axis), style or Vocabulary()

    def shardings(self, what: str, style: Column | Vocabulary) -> Shardings:
        """Return how its variables are divided; `self` may be an ordinary layer. Raises UsageError if it cannot be."""
        return ColumnDense.shardings(self, what, Column(gather=style.gather))

    def become(self, what: str, axis: Axis, style: Column | Vocabulary) -> None:
        """Divide what is an ordinary layer so far."""
        super().become(what, axis, Column(gather=style.gather, sequence=style.sequence))


@keras.saving.register_keras_serializable("commlib")
class RowDense(OwnVariables, keras.layers.Dense):  # type: ignore[misc]  # Keras has no types
    """A dense layer whose inputs are divided: each rank has some rows of the kernel; outputs are added up.

    As `keras.layers.Dense(units)`, with the values that this has on rank 0. inputs: (..., this rank's features), or all
    with `split`. Returns (..., units), whole on every rank or divided along `sequence`. features: how many inputs the
    whole layer has, by default as many as Keras infers for it.
    """

    def __init__(
        self, units: int, axis: On, *, features: int | None = None, style: Row | None = None, **kwargs: Any
    ) -> None:
        super().__init__(units, **kwargs)
        self._given, self._features = (axis_of(axis), style or Row()), features

    def build(self, input_shape: Any) -> None:
        """Make the weights as an ordinary layer does, and keep this rank's part. Collective."""
        super().build((*input_shape[:-1], self._features or input_shape[-1]))
        take_values_of_rank_0(self.name, self.variables, self._given[0].comm)
        self.become(self.path or self.name, *self._given)
        self.compare("built")

    def shardings(self, what: str, style: Row) -> Shardings:
        """Return how its variables are divided; `self` may be an ordinary layer. Raises UsageError if it cannot be."""
        check_plain(what, self, style)
        found = Sharding(whole_shape(self._kernel), 0, (), style.units)
        return [(self._kernel, found), *divided_factors(self, found)]

    def become(self, what: str, axis: Axis, style: Row) -> None:
        """Divide what is an ordinary layer so far."""
        shardings = self.shardings(what, style)
        divide(what, axis, shardings)
        self.supports_jit = False
        self.keep(what, axis, style, shardings[0][1])
        self.input_spec = keras.layers.InputSpec(min_ndim=2)  # what comes is smaller than Keras has been told

    def call(self, inputs: Any, training: Any = None) -> Any:
        """Return the outputs, whole or this rank's part of the sequence."""
        axis, x = self.axis, inputs
        if self.style.split:
            given(axis, self, x)
            x = moved(x, axis, moves.scatter(-1, self.sharding.lengths(axis.size)))
        check_inputs(self, x, -1)
        x = added_up(self, keras.ops.matmul(x, self.kernel), self.bias, self.style.sequence)
        return x if self.activation is None else self.activation(x)

    def compute_mask(self, inputs: Any, previous_mask: Any) -> Any:
        """Return the mask of the output."""
        return scattered_mask(previous_mask, self.axis, self.style.sequence, len(inputs.shape))
