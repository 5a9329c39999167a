"""Layers on sharded features: norms of single channels or of groups of channels, and PReLU, with sharded weights."""

from __future__ import annotations

from typing import Any

import keras

from commlib.sharding.axis import ParallelAxis
from commlib.sharding.sharding import Sharding
from commlib.tensor_parallel import features
from commlib.tensor_parallel.styles import Sequence
from commlib_tensorflow._shards import whole_shape
from commlib_tensorflow.tensor._activity import regularize_activity
from commlib_tensorflow.tensor._sharded_layer import check_plain
from commlib_tensorflow.tensor._sharding import Shardings, shard_variables
from commlib_tensorflow.tensor.moves import copy


class FeatureBatchNormalization(keras.layers.BatchNormalization):  # type: ignore[misc]  # Keras has no types
    """A batch norm of this rank's channels: each has its own moments, including moving ones, and its own weights."""

    def shardings(self, what: str, style: Sequence) -> Shardings:
        """Return the sharding of its variables. Raises UsageError for a dimension that the norm reduces over."""
        return _of_channels(what, self, style)

    def become(self, what: str, axis: ParallelAxis, style: Sequence) -> None:
        """Shard a plain layer in place."""
        _divide(what, self, axis, style, self.shardings(what, style))

    def call(self, inputs: Any, training: Any = None, mask: Any = None) -> Any:
        """Return the norm of this rank's channels."""
        _check_length(self, inputs, self.axis, self.moving_mean.shape[0])
        return super().call(inputs, training=training, mask=mask)


class FeatureGroupNormalization(keras.layers.GroupNormalization):  # type: ignore[misc]  # Keras has no types
    """A group norm of this rank's channels, which are complete groups."""

    groups: int

    def shardings(self, what: str, style: Sequence) -> Shardings:
        """Return the sharding of its variables. Raises UsageError for a dimension that the norm reduces over."""
        return _of_channels(what, self, style, self.groups)

    def become(self, what: str, axis: ParallelAxis, style: Sequence) -> None:
        """Shard a plain layer in place."""
        channels, shardings = self.input_spec.axes[self.axis], self.shardings(what, style)
        whole = Sharding((channels,), 0, (), self.groups)
        whole.check(what, axis.size)
        _divide(what, self, axis, style, shardings)
        self.channels, self.whole_groups = whole.length(axis.rank, axis.size), self.groups
        self.groups = features.own_groups(whole, axis.rank, axis.size)

    def call(self, inputs: Any) -> Any:
        """Return the norm of this rank's groups."""
        _check_length(self, inputs, self.axis, self.channels)
        return super().call(inputs)

    def get_config(self) -> dict[str, Any]:
        """Return the configuration of the unsharded layer."""
        return {**super().get_config(), "groups": self.whole_groups}


class FeaturePReLU(keras.layers.PReLU):  # type: ignore[misc]  # Keras has no types
    """A PReLU of a sharded tensor: each rank has its shard of the slopes; slopes shared by all are replicated."""

    def shardings(self, what: str, style: Sequence) -> Shardings:
        """Return the sharding of its variables."""
        check_plain(what, self, style)
        shape, dim = whole_shape(self.alpha), style.dim % self.input_spec.ndim - 1
        return [] if dim < 0 or shape[dim] == 1 else [(self.alpha, Sharding(shape, dim))]

    def become(self, what: str, axis: ParallelAxis, style: Sequence) -> None:
        """Shard a plain layer in place."""
        shardings = self.shardings(what, style)
        _divide(what, self, axis, style, shardings)
        self.is_shared = not shardings

    def call(self, inputs: Any) -> Any:
        """Return PReLU of this rank's shard."""
        alpha = self.alpha
        if self.is_shared:  # each rank has a part of the gradient
            alpha = copy(keras.ops.convert_to_tensor(alpha), self.divided_axis)
        else:
            dim = self.style.dim % len(inputs.shape)
            _check_length(self, inputs, dim, alpha.shape[dim - 1])
        return keras.ops.relu(inputs) - keras.ops.cast(alpha, inputs.dtype) * keras.ops.relu(-inputs)


def _of_channels(what: str, layer: Any, style: Sequence, units: int = 0) -> Shardings:
    check_plain(what, layer, style)
    ndim = layer.input_spec.ndim
    features.check_dim(what, style.dim % ndim, layer.axis % ndim)
    return [(one, Sharding(whole_shape(one), 0, (), units)) for one in layer.variables]


def _divide(what: str, layer: Any, axis: ParallelAxis, style: Sequence, shardings: Shardings) -> None:
    shard_variables(what, axis, shardings)
    layer.supports_jit = False
    layer.divided_axis, layer.style = axis, style
    regularize_activity(layer, axis, style)
    layer.input_spec = keras.layers.InputSpec(ndim=layer.input_spec.ndim)


def _check_length(layer: Any, x: Any, dim: int, expected: int) -> None:
    """Raise UsageError unless a rank has as many features as weights."""
    axis = layer.divided_axis
    features.check_length(f"{layer.name} on rank {axis.rank} of {axis.comm.name}", x.shape[dim], dim, expected)
