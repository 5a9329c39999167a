"""Penalties of weights that are divided: the loss has those of whole weights, the gradient is this rank's part.

So what is reported is the same on all ranks, and callbacks that decide by it decide alike.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from commlib.sharding.axis import Axis
from commlib.sharding.shards import Shard
from commlib.tensor_parallel.moves import REDUCE
from commlib_tensorflow._graph import result_empty
from commlib_tensorflow._keras_reduction import replace
from commlib_tensorflow._shards import counted, shard_of
from commlib_tensorflow.tensor._gathering import is_sum
from commlib_tensorflow.tensor.moves import moved


def watch_penalties() -> None:
    """Let the losses of Keras' layers have the penalties of whole weights, from now on."""
    replace(keras.layers.Layer, "_get_regularization_losses", _of_whole)


def _of_whole(original: Any) -> Any:
    @functools.wraps(original)
    def _get_regularization_losses(self: Any) -> list[Any]:
        regularized = [variable for variable in self.trainable_weights if variable.regularizer is not None]
        return whole_penalties(regularized, original(self))

    return _get_regularization_losses


def _once(variable: Any, loss: Any, shard: Shard) -> Any:
    """Return the loss of a part without what other ranks count, with the gradient of all of it."""
    if shard.counted[1] is None:
        return loss
    once = variable.regularizer(counted(tf.convert_to_tensor(variable), shard))
    return loss + tf.stop_gradient(tf.cast(once, loss.dtype) - loss)


def whole_penalties(variables: Sequence[Any], losses: Sequence[Any]) -> list[Any]:
    """Return the losses of regularizers, of which sums over elements are of this rank's parts, as those of the whole.

    Collective over the axes of the parts, one message for each. Gradients are as before: of this rank's part.
    """
    found = list(losses)
    places: dict[tuple[Axis, Any], list[int]] = {}
    for at, (variable, loss) in enumerate(zip(variables, found, strict=True)):
        shard = shard_of(variable)
        if shard is not None and not shard.is_local and shard.axis.size > 1 and is_sum(variable.regularizer):
            found[at] = _once(variable, tf.convert_to_tensor(loss), shard)
            places.setdefault((shard.axis, found[at].dtype), []).append(at)
    for (axis, _), own in places.items():
        exact = Axis(axis.comm, empty=result_empty)  # without a codec
        whole = tf.unstack(moved(tf.stack([found[at] for at in own]), exact, REDUCE))
        for at, loss in zip(own, whole, strict=True):
            found[at] = loss
    return found
