"""Convolutions that are divided among the ranks of an axis, by their output or input channels."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from commlib.errors import UsageError
from commlib.sharding.axis import Axis
from commlib.sharding.sharding import Sharding, parts_of
from commlib.tensor_parallel import moves
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
from commlib_tensorflow.tensor.moves import moved


class ColumnConv(OwnVariables):
    """A convolution of Keras whose output channels (filters) are divided: as `ColumnDense`, for any image."""

    def shardings(self: Any, what: str, style: Column) -> Shardings:
        """Return how its variables are divided; `self` may be an ordinary layer. Raises UsageError if it cannot be."""
        _check(what, self, style)
        check_elementwise(what, self.activation, style, self.filters)
        shape, parts = whole_shape(self._kernel), parts_of(what, style.parts, self.filters)
        found = [(self._kernel, Sharding(shape, len(shape) - 1, parts, style.units))]
        if self.bias is not None:
            found.append((self.bias, Sharding(shape[-1:], 0, parts, style.units)))
        return [*found, *divided_factors(self, found[0][1])]

    def become(self: Any, what: str, axis: Axis, style: Column) -> None:
        """Divide what is an ordinary convolution so far."""
        shardings = self.shardings(what, style)
        divide(what, axis, shardings)
        self.supports_jit = False
        self.keep(what, axis, style, shardings[0][1])

    def call(self: Any, inputs: Any) -> Any:
        """Return this rank's channels, or all of them."""
        x = _convolved(self, entered(self, inputs, self.axis, self.style.sequence))
        if self.bias is not None:
            x = x + _along_channels(self, self.bias, x)
        if self.style.gather:
            x = gathered(x, self.axis, self.sharding, _channels(self), layer=self)
        return x if self.activation is None else self.activation(x)


class RowConv(OwnVariables):
    """A convolution of Keras whose input channels are divided; outputs are added up: as `RowDense`, for any image."""

    def shardings(self: Any, what: str, style: Row) -> Shardings:
        """Return how its variables are divided; `self` may be an ordinary layer. Raises UsageError if it cannot be."""
        _check(what, self, style)
        shape = whole_shape(self._kernel)
        found = Sharding(shape, len(shape) - 2, (), style.units)
        return [(self._kernel, found), *divided_factors(self, found)]

    def become(self: Any, what: str, axis: Axis, style: Row) -> None:
        """Divide what is an ordinary convolution so far."""
        shardings = self.shardings(what, style)
        divide(what, axis, shardings)
        self.supports_jit = False
        self.keep(what, axis, style, shardings[0][1])
        self.input_spec = keras.layers.InputSpec(min_ndim=self.rank + 2)

    def call(self: Any, inputs: Any) -> Any:
        """Return all channels, of whole images or of this rank's part of the sequence."""
        axis, channels, x = self.axis, _channels(self), inputs
        if self.style.split:
            given(axis, self, x)
            x = moved(x, axis, moves.scatter(channels, self.sharding.lengths(axis.size)))
        check_inputs(self, x, channels)
        bias = None if self.bias is None else _along_channels(self, self.bias, x)
        x = added_up(self, _convolved(self, x), bias, self.style.sequence)
        return x if self.activation is None else self.activation(x)


def _convolved(layer: Any, x: Any) -> Any:
    """Return what Keras' own layer has before the bias, whatever the number of channels."""
    padding = layer.padding
    if padding == "causal":  # of 1-D convolutions: nothing comes from the future
        before = layer.dilation_rate[0] * (layer.kernel_size[0] - 1)
        places = [(0, 0), (before, 0), (0, 0)]
        x, padding = tf.pad(x, places if _channels(layer) == -1 else [places[0], places[2], places[1]]), "valid"
    return keras.ops.conv(
        x,
        layer.kernel,
        strides=list(layer.strides),
        padding=padding,
        dilation_rate=layer.dilation_rate,
        data_format=layer.data_format,
    )


def _along_channels(layer: Any, bias: Any, x: Any) -> Any:
    after = layer.rank if _channels(layer) == 1 else 0
    return tf.reshape(tf.cast(bias, x.dtype), [-1, *[1] * after])


def _channels(layer: Any) -> int:
    return -1 if layer.data_format == "channels_last" else 1


def _check(what: str, layer: Any, style: Column | Row) -> None:
    check_plain(what, layer, style)
    if layer.groups != 1:
        raise UsageError(
            f"plan: {what}: a convolution with groups={layer.groups} cannot be divided: groups share no channels"
        )
