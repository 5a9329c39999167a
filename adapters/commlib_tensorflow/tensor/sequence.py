"""Layers between divided ones: norms and dropout on shards, and whole layers whose output goes into divided ones."""

from __future__ import annotations

from collections.abc import Hashable
from functools import cache
from typing import Any

import keras
import tensorflow as tf

from commlib.errors import UsageError
from commlib.sharding.axis import Axis
from commlib.tensor_parallel.styles import Replicate, Sequence
from commlib_tensorflow.tensor._activity import check_activity, regularize_activity
from commlib_tensorflow.tensor._alike import given
from commlib_tensorflow.tensor._divided import check_plain
from commlib_tensorflow.tensor._dividing import Shardings
from commlib_tensorflow.tensor.moves import copy
from commlib_tensorflow.tensor.streams import divide_streams

_MIXING = ("attention", "convolutional", "pooling", "reshaping", "rnn")
"""Families of Keras' layers whose outputs depend on several positions, even where they have no weights.

Others are tried on parts.
"""


class SequenceLayerNormalization(keras.layers.LayerNormalization):  # type: ignore[misc]  # Keras has no types
    """A layer norm of a shard of a sequence: weights are whole, and the ranks' parts of their gradient are added."""

    def shardings(self, what: str, style: Sequence) -> Shardings:
        """Return how its variables are divided: none is. Raises UsageError for a dimension that the norm looks at."""
        check_plain(what, self, style)
        _check_features(what, self.axis, style.dim)
        return []

    def become(self, what: str, axis: Axis, style: Sequence) -> None:
        """Take shards instead of whole sequences."""
        self.supports_jit = False
        self.divided_axis, self.style = axis, style
        regularize_activity(self, axis, style)

    def call(self, inputs: Any) -> Any:
        """Return the norm of a shard."""
        _check_features(self.name, self.axis, self.style.dim, len(inputs.shape))
        gamma, beta = _copied(self.divided_axis, self.gamma, self.beta)
        found = keras.ops.layer_normalization(
            inputs, gamma, beta, self.axis, self.epsilon, rms_scaling=self.rms_scaling
        )
        return tf.cast(found, self.compute_dtype)


class SequenceRMSNormalization(keras.layers.RMSNormalization):  # type: ignore[misc]  # Keras has no types
    """An RMS norm of a shard of a sequence: weights are whole, and the ranks' parts of their gradient are added."""

    def shardings(self, what: str, style: Sequence) -> Shardings:
        """Return how its variables are divided: none is. Raises UsageError for a dimension that the norm looks at."""
        check_plain(what, self, style)
        _check_features(what, self.axis, style.dim)
        return []

    def become(self, what: str, axis: Axis, style: Sequence) -> None:
        """Take shards instead of whole sequences."""
        self.supports_jit = False
        self.divided_axis, self.style = axis, style
        regularize_activity(self, axis, style)

    def call(self, x: Any) -> Any:
        """Return the norm of a shard."""
        _check_features(self.name, self.axis, self.style.dim, len(x.shape))
        scale = copy(self.scale, self.divided_axis)
        return keras.ops.rms_normalization(x, scale=scale, axis=self.axis, epsilon=self.epsilon)


class OnShards:
    """A layer without weights, such as dropout, that draws other random numbers on each rank."""

    def shardings(self: Any, what: str, style: Sequence) -> Shardings:
        """Return how its variables are divided: none is. Raises UsageError for a layer that sees several positions."""
        check_activity(what, self, style)
        family = next(kind.__module__ for kind in type(self).__mro__ if kind.__module__.startswith("keras."))
        if self.weights or any(f"layers.{name}." in family for name in _MIXING):
            why = f"has weights, such as {self.weights[0].path}" if self.weights else "looks at several positions"
            raise UsageError(
                f"plan: {what} {why}: Sequence is for LayerNormalization, RMSNormalization, and layers without weights "
                "that look at each position by itself"
            )
        if _draws_for_several(self):
            raise UsageError(
                f"plan: {what} draws one number for several positions, which may be on several ranks: leave it as it "
                "is, if features are whole, so that all ranks draw the same"
            )
        return []

    def become(self: Any, what: str, axis: Axis, style: Sequence) -> None:
        """Take shards instead of whole tensors."""
        self.divided_axis, self.style = axis, style
        regularize_activity(self, axis, style)
        divide_streams(self, axis)


class IntoSharded:
    """A whole layer whose output is used by what is divided: the ranks' parts of its gradient are added."""

    def shardings(self: Any, what: str, style: Replicate) -> Shardings:
        """Return how its variables are divided: none is. Raises UsageError for an activity regularizer."""
        check_activity(what, self, style)
        return []

    def become(self: Any, what: str, axis: Axis, style: Replicate) -> None:
        """Add the gradients of the output."""
        self.supports_jit = False
        self.divided_axis, self.style = axis, style

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Return what the layer gives."""
        found = super().call(*args, **kwargs)  # type: ignore[misc]
        return keras.tree.map_structure(self._copied, found)

    def _copied(self: Any, x: Any) -> Any:
        given(self.divided_axis, self, x, "the output")
        return copy(x, self.divided_axis) if _has_gradient(x) else x


@cache
def mixed(kind: Hashable, plain: Hashable) -> Any:
    """Return a class of layers that are `plain`, with what `kind` does otherwise."""
    classes: Any = (kind, plain)
    return type("".join(one.__name__ for one in classes), classes, {"__doc__": plain.__doc__})


def _has_gradient(x: Any) -> bool:
    return bool(tf.is_tensor(x) and x.dtype.is_floating)


def _draws_for_several(layer: Any) -> bool:
    spatial = any(kind.__name__.startswith("SpatialDropout") for kind in type(layer).__mro__)
    return spatial or getattr(layer, "noise_shape", None) is not None


def _copied(axis: Axis, gamma: Any, beta: Any) -> tuple[Any, Any]:
    """Return both as they are; their gradients are added up by one small reduction."""
    given = [tf.convert_to_tensor(one) for one in (gamma, beta) if one is not None]
    if axis.size == 1 or not given:
        return gamma, beta
    found = tf.unstack(copy(tf.stack(given), axis))
    return (found[0] if gamma is not None else None), (found[-1] if beta is not None else None)


def _check_features(what: str, features: Any, dim: int, dims: int | None = None) -> None:
    """Raise UsageError if the dimension that is divided is one of those that a norm looks at as a whole."""
    given = features if isinstance(features, list | tuple) else [features]
    if dims is not None:
        dim, given = dim % dims, [one % dims for one in given]
    if dim in given:
        raise UsageError(
            f"plan: {what}: Sequence(dim={dim}), but this is a norm over dimensions {list(given)}, and would see a "
            "part of them: gather the features first"
        )
