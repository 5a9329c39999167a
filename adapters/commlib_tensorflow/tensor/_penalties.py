"""Penalties of sharded weights: the loss counts unsharded weights, the gradient is for this rank's shard.

So the reported loss is the same on all ranks, and callbacks that depend on it decide the same.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from commlib.sharding.axis import ParallelAxis
from commlib.sharding.shards import Shard
from commlib.tensor_parallel.moves import REDUCE
from commlib_tensorflow._host_calls import result_empty
from commlib_tensorflow._keras_reduction import replace
from commlib_tensorflow._shards import shard_of, take_counted
from commlib_tensorflow.tensor._gathering import is_sum
from commlib_tensorflow.tensor.moves import redistribute


def watch_penalties() -> None:
    """Make the losses of Keras' layers include the penalties of unsharded weights, from now on."""
    replace(keras.layers.Layer, "_get_regularization_losses", _wrap_losses)


def _wrap_losses(original: Any) -> Any:
    @functools.wraps(original)
    def _get_regularization_losses(self: Any) -> list[Any]:
        regularized = [variable for variable in self.trainable_weights if variable.regularizer is not None]
        return whole_penalties(regularized, original(self))

    return _get_regularization_losses


def _count_once(variable: Any, loss: Any, shard: Shard) -> Any:
    """Return the loss of a shard without the elements that other ranks count, but with its full gradient."""
    if shard.counted[1] is None:
        return loss
    once = variable.regularizer(take_counted(tf.convert_to_tensor(variable), shard))
    return loss + tf.stop_gradient(tf.cast(once, loss.dtype) - loss)


def whole_penalties(variables: Sequence[Any], losses: Sequence[Any]) -> list[Any]:
    """Convert the losses of element-wise regularizers from this rank's shards to the full weights.

    Collective over the axes of the shards, one message for each. Gradients, for this rank's shard, do not change.
    """
    penalties = list(losses)
    places: dict[tuple[ParallelAxis, Any], list[int]] = {}
    for at, (variable, loss) in enumerate(zip(variables, penalties, strict=True)):
        shard = shard_of(variable)
        if shard is not None and not shard.is_local and shard.axis.size > 1 and is_sum(variable.regularizer):
            penalties[at] = _count_once(variable, tf.convert_to_tensor(loss), shard)
            places.setdefault((shard.axis, penalties[at].dtype), []).append(at)
    for (axis, _), own in places.items():
        exact = ParallelAxis(axis.comm, empty=result_empty)  # without a codec
        whole = tf.unstack(redistribute(tf.stack([penalties[at] for at in own]), exact, REDUCE))
        for at, loss in zip(own, whole, strict=True):
            penalties[at] = loss
    return penalties
