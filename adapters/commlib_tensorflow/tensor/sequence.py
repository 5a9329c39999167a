"""Layers between sharded ones: norms and dropout on shards, and unsharded layers whose output enters sharded ones."""

from __future__ import annotations

from collections.abc import Hashable
from functools import cache
from typing import Any

import keras
import tensorflow as tf

from commlib.errors import UsageError
from commlib.sharding.axis import ParallelAxis
from commlib.tensor_parallel.features import check_norm
from commlib.tensor_parallel.styles import Replicate, Sequence
from commlib_tensorflow.tensor._activity import check_activity, regularize_activity
from commlib_tensorflow.tensor._comparison import note_input
from commlib_tensorflow.tensor._sharded_layer import check_plain
from commlib_tensorflow.tensor._sharding import Shardings
from commlib_tensorflow.tensor.moves import copy
from commlib_tensorflow.tensor.streams import split_streams

_MIXING = ("attention", "convolutional", "pooling", "reshaping", "rnn")
"""Keras' layer families whose outputs depend on several positions, even if they have no weights.

Other layers are tried on shards.
"""


class _SequenceNorm:
    """A norm of a sequence shard."""

    axis: Any

    def shardings(self, what: str, style: Sequence) -> Shardings:
        """Return no shardings. Raises UsageError for a dimension that the norm reduces over."""
        check_plain(what, self, style)
        _check_features(what, self.axis, style.dim)
        return []

    def become(self, what: str, axis: ParallelAxis, style: Sequence) -> None:
        """Take shards instead of whole sequences."""
        self.supports_jit = False
        self.divided_axis, self.style = axis, style
        regularize_activity(self, axis, style)


class SequenceLayerNormalization(_SequenceNorm, keras.layers.LayerNormalization):  # type: ignore[misc]  # Keras has no types
    """A layer norm of a sequence shard: weights are replicated, and the ranks' parts of their gradient summed."""

    def call(self, inputs: Any) -> Any:
        """Return the norm of a shard."""
        _check_features(self.name, self.axis, self.style.dim, len(inputs.shape))
        gamma, beta = _copy(self.divided_axis, self.gamma, self.beta)
        output = keras.ops.layer_normalization(
            inputs, gamma, beta, self.axis, self.epsilon, rms_scaling=self.rms_scaling
        )
        return tf.cast(output, self.compute_dtype)


class SequenceRMSNormalization(_SequenceNorm, keras.layers.RMSNormalization):  # type: ignore[misc]  # Keras has no types
    """An RMS norm of a sequence shard: weights are replicated, and the ranks' parts of their gradient summed."""

    def call(self, x: Any) -> Any:
        """Return the norm of a shard."""
        _check_features(self.name, self.axis, self.style.dim, len(x.shape))
        scale = copy(self.scale, self.divided_axis)
        return keras.ops.rms_normalization(x, scale=scale, axis=self.axis, epsilon=self.epsilon)


class ShardwiseLayer:
    """A layer without weights, such as dropout, that draws different random numbers on each rank."""

    def shardings(self: Any, what: str, style: Sequence) -> Shardings:
        """Return no shardings. Raises UsageError for a layer that sees several positions."""
        check_activity(what, self, style)
        family = next(kind.__module__ for kind in type(self).__mro__ if kind.__module__.startswith("keras."))
        if self.weights or any(f"layers.{name}." in family for name in _MIXING):
            why = f"has weights, such as {self.weights[0].path}" if self.weights else "depends on several positions"
            raise UsageError(
                f"plan: {what} {why}: Sequence is for LayerNormalization, RMSNormalization, and layers without weights "
                "that treat each position separately"
            )
        if _draws_for_several(self):
            raise UsageError(
                f"plan: {what} draws one number for several positions, which may be on several ranks: leave it without "
                "a style, if features are unsharded, so that all ranks draw the same"
            )
        return []

    def become(self: Any, what: str, axis: ParallelAxis, style: Sequence) -> None:
        """Take shards instead of unsharded tensors."""
        self.divided_axis, self.style = axis, style
        regularize_activity(self, axis, style)
        split_streams(self, axis)


class ReplicatedLayer:
    """An unsharded layer whose output enters sharded layers: the ranks' parts of its gradient are summed."""

    def shardings(self: Any, what: str, style: Replicate) -> Shardings:
        """Return no shardings. Raises UsageError for an activity regularizer."""
        check_activity(what, self, style)
        return []

    def become(self: Any, what: str, axis: ParallelAxis, style: Replicate) -> None:
        """Sum the gradients of the output."""
        self.supports_jit = False
        self.divided_axis, self.style = axis, style

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the layer's output."""
        output = super().call(*args, **kwargs)  # type: ignore[misc]
        return keras.tree.map_structure(self._copy, output)

    def _copy(self: Any, x: Any) -> Any:
        note_input(self.divided_axis, self, x, "the output")
        return copy(x, self.divided_axis) if _has_gradient(x) else x


@cache
def subclass_around(kind: Hashable, plain: Hashable) -> Any:
    """Return a class of layers that are `plain`, with the changes of `kind`."""
    classes: Any = (kind, plain)
    return type("".join(one.__name__ for one in classes), classes, {"__doc__": plain.__doc__})


def _has_gradient(x: Any) -> bool:
    return bool(tf.is_tensor(x) and x.dtype.is_floating)


def _draws_for_several(layer: Any) -> bool:
    spatial = any(kind.__name__.startswith("SpatialDropout") for kind in type(layer).__mro__)
    return spatial or getattr(layer, "noise_shape", None) is not None


def _copy(axis: ParallelAxis, gamma: Any, beta: Any) -> tuple[Any, Any]:
    """Return both unchanged; their gradients are summed by one small reduction."""
    given = [tf.convert_to_tensor(one) for one in (gamma, beta) if one is not None]
    if axis.size == 1 or not given:
        return gamma, beta
    copies = tf.unstack(copy(tf.stack(given), axis))
    return (copies[0] if gamma is not None else None), (copies[-1] if beta is not None else None)


def _check_features(what: str, features: Any, dim: int, dims: int | None = None) -> None:
    """Raise UsageError if the sharded dimension is one over which a norm reduces."""
    given = features if isinstance(features, list | tuple) else [features]
    if dims is not None:
        dim, given = dim % dims, [one % dims for one in given]
    check_norm(what, dim, given)
