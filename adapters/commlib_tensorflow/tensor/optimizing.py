"""Keras optimizers and sharded variables: norms count unsharded weights, and ranks agree on an overflow.

Keras clips gradients, and checks for infinities, within one process. The first sharded variable replaces these methods
of Keras' optimizers by ones that behave the same for other variables. Optimizers that use full weights in another way
are refused, and so is a step that would make ranks diverge.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from commlib.comparison.gradient_comparison import EVERY, MOST, is_due
from commlib.kernels.norm import sum_of_squares
from commlib.sharding.axis import ParallelAxis
from commlib.tensor_parallel.checks.axis_equality import check_alike
from commlib.tensor_parallel.run.optimizers import check_optimizer
from commlib_tensorflow._bridge import Array
from commlib_tensorflow._host_calls import Spec, call, is_ordered
from commlib_tensorflow._keras_reduction import replace
from commlib_tensorflow._shards import shard_of, take_counted
from commlib_tensorflow._variables import dtype_of, path_of
from commlib_tensorflow.clip import clip_by_global_norm, values_of, with_values
from commlib_tensorflow.tensor._comparison import take_graph_notes

_CLIPPED = "_commlib_clipped"


def watch_optimizers() -> None:
    """Make Keras' optimizers handle sharded variables, from now on."""
    for name, make in (("_backend_apply_gradients", _wrap_apply), ("_clip_gradients", _wrap_clip)):
        replace(next(kind for kind in keras.optimizers.Optimizer.__mro__ if name in vars(kind)), name, make)
    replace(keras.optimizers.LossScaleOptimizer, "check_finite", _wrap_check_finite)


def axes_of(variables: Iterable[Any]) -> list[ParallelAxis]:
    """Return the axes over which some of the variables are sharded, each once, in order."""
    return list(dict.fromkeys(shard.axis for v in variables if (shard := shard_of(v)) is not None))


def _wrap_apply(original: Any) -> Any:
    @functools.wraps(original)
    def _backend_apply_gradients(self: Any, grads: Any, trainable_variables: Any) -> Any:
        check_optimizer(self, ((path_of(variable), shard_of(variable)) for variable in trainable_variables))
        object.__setattr__(self, _CLIPPED, list(trainable_variables))  # bypasses Keras, which tracks attributes
        _compare(self, list(grads), list(trainable_variables))
        return original(self, grads, trainable_variables)

    return _backend_apply_gradients


def _compare(optimizer: Any, grads: Sequence[Any], variables: Sequence[Any]) -> None:
    """Compare samples, and gradients of unsharded variables, along the axes of sharded ones, in some steps."""
    shards = [shard_of(variable) for variable in variables]
    axes = dict.fromkeys(shard.axis for shard in shards if shard is not None and not shard.is_local)
    compared = [axis for axis in axes if axis.size > 1]
    if not compared or not is_ordered():
        return
    whole = [
        (variable, gradient)
        for variable, gradient, shard in zip(variables, grads, shards, strict=True)
        if shard is None and gradient is not None
    ]
    names, dtypes = [path_of(variable) for variable, _ in whole], [dtype_of(variable) for variable, _ in whole]
    what = f"{type(optimizer).__name__} of Keras"
    noted = [] if tf.executing_eagerly() else list(take_graph_notes(compared))

    def compare() -> Any:
        read = [note.read() for note in noted]
        inputs = [*(values_of(gradient) for _, gradient in whole), *(one for tensors in read for one in tensors)]

        def measure(*arrays: Array) -> list[Array]:
            given = iter(arrays)
            squares = [sum_of_squares(np.ascontiguousarray(next(given).reshape(-1)[:MOST])) for _ in whole]
            notes = [(one.axis, one.note(*(next(given) for _ in own))) for one, own in zip(noted, read, strict=True)]
            for axis in compared:
                own_notes = [note for of, note in notes if of is axis] if notes else axis.watch.take()
                check_alike(what, axis, own_notes, names, squares, dtypes)
            return [np.zeros((), np.int32)]

        return call(measure, inputs, [Spec(tf.int32, ())])[0]

    step = tf.cast(optimizer._iterations.value, tf.int64) + 1  # of each micro-step, if Keras accumulates gradients
    if tf.executing_eagerly():
        if is_due(int(step)):
            compare()
        for axis in compared:
            axis.watch.passed(optimizer, int(step))
        return
    if not (whole or noted):
        return
    few = tf.equal(tf.bitwise.bitwise_and(step, step - 1), 0)
    tf.cond(tf.where(step > EVERY, tf.equal(step % EVERY, 0), few), compare, lambda: tf.zeros((), tf.int32))


def _wrap_clip(original: Any) -> Any:
    @functools.wraps(original)
    def _clip_gradients(self: Any, grads: Any) -> Any:
        variables = getattr(self, _CLIPPED, ())
        if not axes_of(variables) or not (self.clipnorm or self.global_clipnorm):
            return original(self, grads)
        if self.clipnorm:
            return _clip_each(grads, variables, self.clipnorm)
        clipped, _ = clip_by_global_norm(grads, self.global_clipnorm, variables)
        return [None if gradient is None else tf.convert_to_tensor(gradient) for gradient in clipped]  # as Keras does

    return _clip_gradients


def _clip_each(gradients: Sequence[Any], variables: Sequence[Any], clip_norm: float) -> list[Any]:
    """Clip each gradient by its own norm, unsharded for a shard: one message for each axis.

    For embedding rows each row counts, and the gradient stays sparse, as in `tf.clip_by_norm`: Keras' moments would
    differ if rows of one word were summed.
    """
    results = [tf.clip_by_norm(gradient, clip_norm) for gradient in gradients]
    for axis in axes_of(variables):
        places = [n for n, v in enumerate(variables) if (shard := shard_of(v)) is not None and shard.axis is axis]
        own = [values_of(gradients[place]) for place in places]
        once = [take_counted(values, shard_of(variables[place])) for values, place in zip(own, places, strict=True)]

        def measure(*arrays: Array, axis: ParallelAxis = axis) -> list[Array]:
            squares = np.array([sum_of_squares(array.reshape(-1)) for array in arrays])
            return [np.sqrt(axis.comm.all_reduce(squares))]

        (norms,) = call(measure, once, [Spec(tf.float64, (len(own),))])
        for place, values, norm in zip(places, own, tf.unstack(norms), strict=True):
            factor = tf.where(norm > clip_norm, clip_norm / norm, tf.ones_like(norm))
            results[place] = with_values(gradients[place], values * tf.cast(factor, values.dtype))
    return results


def _wrap_check_finite(original: Any) -> Any:
    @functools.wraps(original)
    def check_finite(self: Any, grads: Any) -> Any:
        finite = original(self, grads)
        for axis in axes_of(self.inner_optimizer._trainable_variables):
            (flag,) = call(
                lambda array, axis=axis: [axis.comm.all_reduce(array.astype(np.int32), "min")],
                [tf.cast(finite, tf.int32)],
                [Spec(tf.int32, ())],
            )
            finite = tf.cast(flag, tf.bool)
        return finite

    return check_finite
