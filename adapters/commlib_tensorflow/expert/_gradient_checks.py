"""Gradient checks before Keras optimizers update: detect in some steps if ranks diverge, or experts are mixed up."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from commlib.comparison.gradient_comparison import EVERY, MOST, is_due, print_of
from commlib.expert.shared_gradients import check_step, has_experts
from commlib.kernels.norm import sum_of_squares
from commlib_tensorflow._bridge import Array
from commlib_tensorflow._host_calls import Spec, call, is_ordered
from commlib_tensorflow._keras_reduction import DistributedMixin, key_of
from commlib_tensorflow._shards import is_marked_local, shard_of
from commlib_tensorflow._variables import dtype_of, path_of
from commlib_tensorflow.clip import values_of

_warned: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()


def compare_gradients(optimizer: Any, grads: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
    """Compare the gradients for the next step, if a comparison is due; return the operations to wait for."""
    left = optimizer._commlib.local_keys() if isinstance(optimizer, DistributedMixin) else ()
    entries = [
        (variable, gradient, shard_of(variable))
        for variable, gradient in zip(variables, grads, strict=True)
        if gradient is not None and key_of(variable) not in left and not is_marked_local(variable)
    ]
    if not has_experts(shard for *_, shard in entries) or not is_ordered():
        return []
    entries = [one for one in entries if one[2] is None or one[2].is_local]
    warned = _warned.setdefault(optimizer, set())

    def measure(*arrays: Array) -> list[Array]:
        given, own = arrays[: len(entries)], arrays[len(entries) :]
        squares = [sum_of_squares(np.ascontiguousarray(array.reshape(-1)[:MOST])) for array in given]
        gradients = [
            (path_of(variable), shard, one, dtype_of(variable))
            for (variable, _, shard), one in zip(entries, squares, strict=True)
        ]
        check_step(f"{type(optimizer).__name__} of Keras", gradients, warned, [print_of(array) for array in own])
        return [np.zeros((), np.int32)]

    def compare(*, first: bool = False) -> Any:
        own = [tf.reshape(variable, (-1,))[:MOST] for variable, _, shard in entries if first and shard is None]
        return call(measure, [*(values_of(gradient) for _, gradient, _ in entries), *own], [Spec(tf.int32, ())])[0]

    passes = optimizer.gradient_accumulation_steps or 1
    step = tf.cast(optimizer._iterations.value, tf.int64) // passes + 1
    if tf.executing_eagerly():
        return [compare(first=int(step) == 1)] if is_due(int(step)) else []
    few = tf.equal(tf.bitwise.bitwise_and(step, step - 1), 0)
    due = tf.where(step > EVERY, tf.equal(step % EVERY, 0), few)
    seldom = functools.partial(tf.cond, due, compare, lambda: tf.zeros((), tf.int32))
    return [tf.cond(tf.equal(step, 1), functools.partial(compare, first=True), seldom)]
