"""Convolutions that are sharded over the ranks of an axis, by their output or input channels."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from commlib.errors import UsageError
from commlib.sharding.axis import ParallelAxis
from commlib.sharding.sharding import Sharding, parts_of
from commlib.tensor_parallel import moves
from commlib.tensor_parallel.styles import Column, Row
from commlib_tensorflow._shards import whole_shape
from commlib_tensorflow.tensor._comparison import note_input
from commlib_tensorflow.tensor._gathering import gather_outputs
from commlib_tensorflow.tensor._input_cache import enter
from commlib_tensorflow.tensor._lora import sharded_factors
from commlib_tensorflow.tensor._sharded_layer import (
    ShardedLayer,
    add_up,
    check_elementwise,
    check_inputs,
    check_plain,
)
from commlib_tensorflow.tensor._sharding import Shardings
from commlib_tensorflow.tensor.moves import redistribute


class ColumnConv(ShardedLayer):
    """A convolution of Keras with sharded output channels (filters): like `ColumnDense`, for any image."""

    def shardings(self: Any, what: str, style: Column) -> Shardings:
        """Return the sharding of its variables; `self` may be a plain layer. Raises UsageError if impossible."""
        _check(what, self, style)
        check_elementwise(what, self.activation, style, self.filters)
        shape, parts = whole_shape(self._kernel), parts_of(what, style.parts, self.filters)
        shardings = [(self._kernel, Sharding(shape, len(shape) - 1, parts, style.units))]
        if self.bias is not None:
            shardings.append((self.bias, Sharding(shape[-1:], 0, parts, style.units)))
        return [*shardings, *sharded_factors(self, shardings[0][1])]

    def call(self: Any, inputs: Any) -> Any:
        """Return this rank's channels, or all of them."""
        x = _convolve(self, enter(self, inputs, self.axis, self.style.sequence))
        if self.bias is not None:
            x = x + _reshape_bias(self, self.bias, x)
        if self.style.gather:
            x = gather_outputs(x, self.axis, self.sharding, _channels(self), layer=self)
        return x if self.activation is None else self.activation(x)


class RowConv(ShardedLayer):
    """A convolution of Keras with sharded input channels, whose outputs are summed: like `RowDense`, for any image."""

    def shardings(self: Any, what: str, style: Row) -> Shardings:
        """Return the sharding of its variables; `self` may be a plain layer. Raises UsageError if impossible."""
        _check(what, self, style)
        shape = whole_shape(self._kernel)
        sharding = Sharding(shape, len(shape) - 2, (), style.units)
        return [(self._kernel, sharding), *sharded_factors(self, sharding)]

    def become(self: Any, what: str, axis: ParallelAxis, style: Row) -> None:
        """Shard a plain convolution in place."""
        super().become(what, axis, style)
        self.input_spec = keras.layers.InputSpec(min_ndim=self.rank + 2)

    def call(self: Any, inputs: Any) -> Any:
        """Return all channels, of full images or of this rank's shard of the sequence."""
        axis, channels, x = self.axis, _channels(self), inputs
        if self.style.split:
            note_input(axis, self, x)
            x = redistribute(x, axis, moves.scatter(channels, self.sharding.lengths(axis.size)))
        check_inputs(self, x, channels)
        bias = None if self.bias is None else _reshape_bias(self, self.bias, x)
        x = add_up(self, _convolve(self, x), bias, self.style.sequence)
        return x if self.activation is None else self.activation(x)


def _convolve(layer: Any, x: Any) -> Any:
    """Return the convolution as Keras' own layer computes it before the bias, for any number of channels."""
    padding = layer.padding
    if padding == "causal":  # 1-D convolutions only: no position sees a later one
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


def _reshape_bias(layer: Any, bias: Any, x: Any) -> Any:
    after = layer.rank if _channels(layer) == 1 else 0
    return tf.reshape(tf.cast(bias, x.dtype), [-1, *[1] * after])


def _channels(layer: Any) -> int:
    return -1 if layer.data_format == "channels_last" else 1


def _check(what: str, layer: Any, style: Column | Row) -> None:
    check_plain(what, layer, style)
    if layer.groups != 1:
        raise UsageError(
            f"plan: {what}: a convolution with groups={layer.groups} cannot be sharded: groups share no channels"
        )
