"""Dense layers that are divided among the ranks of an axis."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from commlib.errors import UsageError
from commlib.functional.axis import Axis
from commlib.tensor import moves
from commlib.tensor.moves import COPY, REDUCE
from commlib.tensor.sharding import Sharding, parts_of
from commlib.tensor.styles import Column, Row
from commlib_tensorflow._shards import divide
from commlib_tensorflow.tensor.moves import On, axis_of, copy, moved


class ColumnDense(keras.layers.Dense):  # type: ignore[misc]  # Keras has no types
    """A dense layer whose units are divided: each rank has some columns of the kernel.

    As `keras.layers.Dense(units)`. inputs: (..., features), whole on every rank, or divided along `sequence`. Returns
    (..., this rank's units), or all with `gather`. Other arguments: see `commlib.tensor.Column`.
    """

    def __init__(self, units: int, axis: On, *, style: Column | None = None, **kwargs: Any) -> None:
        super().__init__(units, **kwargs)
        self._given = axis_of(axis), style or Column()

    def build(self, input_shape: Any) -> None:
        """Make the weights as an ordinary layer does, and keep this rank's part."""
        super().build(input_shape)
        self.become(self.path or self.name, *self._given)

    def become(self, what: str, axis: Axis, style: Column) -> None:
        """Divide what is an ordinary layer so far."""
        check_plain(what, self)
        self.supports_jit = False
        self.axis, self.style = axis, style
        self.elementwise = is_elementwise(self.activation)
        if not (self.elementwise or style.gather):
            raise UsageError(
                f"plan: {what}: its activation {keras.activations.serialize(self.activation)!r} needs all units: give "
                "Column(gather=True), or make it a layer of its own behind a Row"
            )
        parts = parts_of(what, style.parts, self.units)
        shape = tuple(self.kernel.shape)
        self.sharding = Sharding(shape, 1, parts, style.units)
        divide(what, self._kernel, axis, self.sharding)
        if self.bias is not None:
            divide(what, self.bias, axis, Sharding(shape[1:], 0, parts, style.units))

    def call(self, inputs: Any, training: Any = None) -> Any:
        """Return this rank's units, or all of them."""
        sequence = self.style.sequence
        x = moved(inputs, self.axis, COPY if sequence is None else moves.gather(sequence, partial=True))
        if not self.style.gather:
            return super().call(x)
        x = tf.matmul(x, self.kernel)
        if self.bias is not None:
            x = x + tf.cast(self.bias, x.dtype)
        x = gathered(x, self.axis, self.sharding)
        return x if self.activation is None else self.activation(x)


class RowDense(keras.layers.Dense):  # type: ignore[misc]  # Keras has no types
    """A dense layer whose inputs are divided: each rank has some rows of the kernel; outputs are added up.

    As `keras.layers.Dense(units)`. inputs: (..., this rank's features), or all with `split`. Returns (..., units),
    whole on every rank or divided along `sequence`.
    """

    def become(self, what: str, axis: Axis, style: Row) -> None:
        """Divide what is an ordinary layer so far."""
        check_plain(what, self)
        self.supports_jit = False
        self.axis, self.style = axis, style
        self.sharding = Sharding(tuple(self.kernel.shape), 0, (), style.units)
        divide(what, self._kernel, axis, self.sharding)
        expected = self.sharding.shape[0] if style.split else self.kernel.shape[0]
        self.input_spec = keras.layers.InputSpec(min_ndim=2, axes={-1: expected})

    def call(self, inputs: Any, training: Any = None) -> Any:
        """Return the outputs, whole or this rank's part of the sequence."""
        axis, sequence, x = self.axis, self.style.sequence, inputs
        if self.style.split:
            x = moved(x, axis, moves.scatter(-1, self.sharding.lengths(axis.size)))
        x = tf.matmul(x, self.kernel)
        x = moved(x, axis, REDUCE if sequence is None else moves.reduce_scatter(sequence))
        if self.bias is not None:
            # Of a divided sequence each rank has a part of the bias' gradient.
            x = x + tf.cast(self.bias if sequence is None else copy(self.bias, axis), x.dtype)
        return x if self.activation is None else self.activation(x)


_ELEMENTWISE = frozenset((
    "linear", "relu", "relu6", "leaky_relu", "elu", "selu", "celu", "gelu", "silu", "swish", "mish", "softplus",
    "softsign", "sigmoid", "hard_sigmoid", "hard_silu", "hard_swish", "log_sigmoid", "tanh", "hard_tanh",
    "tanh_shrink", "hard_shrink", "soft_shrink", "exponential", "squareplus", "threshold", "sparse_plus",
))  # fmt: skip


def is_elementwise(activation: Any) -> bool:
    """Return whether an activation of Keras looks at one element at a time. Those of users are taken to do so."""
    name = getattr(activation, "__name__", "")
    return getattr(keras.activations, name, None) is not activation or name in _ELEMENTWISE


def gathered(out: Any, axis: Axis, sharding: Sharding) -> Any:
    """Return the outputs of all ranks in the order of the whole, along the last dimension."""
    lengths = sharding.lengths(axis.size)
    whole = moved(out, axis, moves.gather(-1, lengths=lengths))
    if len(sharding.parts) < 2:
        return whole
    offsets = [sum(lengths[:rank]) for rank in range(axis.size)]
    pieces = sharding.pieces(axis.size)
    return tf.concat([whole[..., offsets[rank] + first : offsets[rank] + last] for rank, first, last, _ in pieces], -1)


def check_plain(what: str, layer: Any) -> None:
    """Raise UsageError for a layer that is not built, or is changed in ways that do not go with being divided."""
    if not layer.built:
        raise UsageError(f"plan: {what} is not built: call the model once, or give it an Input")
    if getattr(layer, "lora_enabled", False) or getattr(layer, "quantization_mode", None):
        raise UsageError(f"plan: {what} has LoRA or is quantised: divide it before that")
