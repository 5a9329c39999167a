"""Batch normalisation over the batches of all ranks: see `commlib.horovod.batch_norm`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from commlib import horovod as core
from commlib.horovod.batch_norm import compare_layer, gather_statistics
from commlib_tensorflow._bridge import Array
from commlib_tensorflow._host_calls import (
    Spec,
    call,
    gradient_name,
    layer_name,
    no_autograph,
    refuse_vectorized,
    result_empty,
)
from commlib_tensorflow.named_verbs.operations import allreduce


@keras.saving.register_keras_serializable(package="commlib_tensorflow")
class SyncBatchNormalization(keras.layers.BatchNormalization):  # type: ignore[misc]  # Keras has no types
    """Normalise like `keras.layers.BatchNormalization`, over the concatenated batches of all ranks.

    Ranks may have different numbers of examples. Outputs, moving statistics and gradients are those of the whole batch,
    the gradients being those of the sum over ranks of their losses. Training is collective over `process_set`, by
    default all ranks: one message forward and one backward per layer. Inference is not. All other arguments are those
    of Keras.

    Args:
        process_set: The participating ranks; None: all.
        *arguments: Arguments of `keras.layers.BatchNormalization`.
        **options: Arguments of `keras.layers.BatchNormalization`.

    Raises:
        MismatchError: On every rank if ranks have different arguments, when the layer is first used in training.

    Examples:
        >>> norm = ct.SyncBatchNormalization()
        >>> norm(tf.ones([4 + comm.rank, 3]), training=True).shape[1]
        3
    """

    def __init__(self, *arguments: Any, process_set: core.ProcessSet | None = None, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.supports_jit = False  # XLA cannot call host functions; Keras then does not choose XLA by default
        self._process_set = process_set
        self._is_compared = False

    @property
    def ranks(self) -> list[int]:
        """The ranks that share statistics, as world ranks."""
        return list(core.process_set_of(self._process_set).ranks or [])

    def _moments(self, inputs: Any, mask: Any) -> tuple[Any, Any]:
        group = core.process_set_of(self._process_set)
        if group.size() == 1:
            return super()._moments(inputs, mask)  # type: ignore[no-any-return]
        weights = tf.ones_like(inputs[..., :1])
        if mask is not None:
            weights = tf.cast(tf.cast(tf.expand_dims(mask, -1), tf.bool), inputs.dtype)
        weights = tf.broadcast_to(weights, tf.shape(inputs))
        return _reduce_moments(inputs, weights, list(self._reduction_axes), group, self._compare)

    def _compare(self, name: str, group: core.ProcessSet) -> None:
        """Compare arguments with those of the other ranks. Collective, at the first use."""
        if not self._is_compared:
            names = ("axis", "momentum", "epsilon", "center", "scale")
            compare_layer(name, group, {name: getattr(self, name) for name in names})
            self._is_compared = True


@no_autograph
def _reduce_moments(
    inputs: tf.Tensor,
    weights: tf.Tensor,
    axes: list[int],
    group: core.ProcessSet,
    compare: Callable[[str, core.ProcessSet], None],
) -> tuple[tf.Tensor, tf.Tensor]:
    """Return mean and variance per channel, over `axes` and all ranks, of the elements with weight 1 instead of 0."""
    refuse_vectorized()
    channels = tf.TensorShape([size for axis, size in enumerate(inputs.shape) if axis not in axes])
    name = layer_name("SyncBatchNorm")

    def forward(x: Any) -> tuple[tuple[Any, Any], Callable[..., Any]]:
        count = tf.reduce_sum(weights, axes)
        mean = tf.math.divide_no_nan(tf.reduce_sum(x * weights, axes), count)
        centred = (x - _broadcast_shape(mean, x, axes)) * weights
        squares = tf.reduce_sum(tf.square(centred), axes)

        def host(count: Array, mean: Array, squares: Array) -> list[Array]:
            compare(name or "SyncBatchNorm", group)
            statistics = gather_statistics(np.concatenate([count, mean, squares]), len(mean), name, group)
            divisor = np.maximum(statistics.count, 1)
            return [_convert(array, mean.dtype) for array in (divisor, statistics.mean, statistics.variance)]

        total, mean, variance = call(host, [count, mean, squares], [Spec(x.dtype, channels)] * 3)

        def backward(dmean: Any, dvariance: Any) -> Any:
            # Every rank's loss depends on the moments, and they on every rank's inputs.
            both = allreduce(
                tf.stack([dmean, dvariance]),
                op=core.Sum,
                name=gradient_name(name),
                process_set=group,
                ignore_name_scope=True,
            )
            dmean, dvariance = both[0] / total, both[1] / total
            centred = x - _broadcast_shape(mean, x, axes)
            return weights * (_broadcast_shape(dmean, x, axes) + 2 * centred * _broadcast_shape(dvariance, x, axes))

        return (mean, variance), backward

    mean, variance = tf.custom_gradient(forward)(inputs)
    return mean, variance


def _convert(array: Array, dtype: Any) -> Array:
    result = result_empty(array.shape, dtype)
    result[...] = array
    return result


def _broadcast_shape(per_channel: tf.Tensor, like: tf.Tensor, axes: list[int]) -> tf.Tensor:
    """Reshape a tensor per channel so that it broadcasts against `like`."""
    shape = tf.tensor_scatter_nd_update(tf.shape(like), [[axis] for axis in axes], [1] * len(axes))
    return tf.reshape(per_channel, shape)
