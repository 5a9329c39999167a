"""Update hooks for Keras optimizers: compare gradients before an update, and call methods after it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from commlib_tensorflow._keras_reduction import replace
from commlib_tensorflow.expert._gradient_checks import compare_gradients

_MARK = "commlib_after_step"


def watch_updates() -> None:
    """Compare, in some steps, the gradients of optimizers that train experts, from now on."""
    name = "_backend_update_step"
    replace(next(kind for kind in keras.optimizers.Optimizer.__mro__ if name in vars(kind)), name, _wrap_update_step)


def call_after_step(variable: Any, method: Callable[[], None]) -> None:
    """Call a method after each update of a variable, in the graph that updates it. Needs `watch_updates`.

    By then forward and backward have finished, so their counts are complete.
    """
    setattr(variable, _MARK, method)


def _wrap_update_step(original: Any) -> Any:
    @functools.wraps(original)
    def _backend_update_step(self: Any, grads: Any, trainable_variables: Any, learning_rate: Any) -> Any:
        before = compare_gradients(self, grads, trainable_variables)
        with tf.control_dependencies(before):
            result = original(self, grads, trainable_variables, learning_rate)
        methods = [method for one in trainable_variables if (method := getattr(one, _MARK, None)) is not None]
        if methods:
            # In a branch of a graph, such as the one of the last of several passes, nothing orders host nodes after the
            # earlier nodes: TensorFlow orders only its own variables.
            with tf.control_dependencies([*before, *(gradient for gradient in grads if gradient is not None)]):
                for method in methods:
                    method()
        return result

    return _backend_update_step
