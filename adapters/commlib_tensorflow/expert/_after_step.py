"""Around the update of an optimizer of Keras: compare its gradients before, and call methods afterwards."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from commlib_tensorflow._keras_reduction import replace
from commlib_tensorflow.expert._stepped import compared

_MARK = "commlib_after_step"


def watch_updates() -> None:
    """Compare the gradients of optimizers that have experts now and then, from now on."""
    name = "_backend_update_step"
    replace(next(kind for kind in keras.optimizers.Optimizer.__mro__ if name in vars(kind)), name, _noticing)


def call_after_step(variable: Any, method: Callable[[], None]) -> None:
    """Let a method be called after each update of a variable, in the graph that updates it.

    By then all gradients are there, and so all that forward and backward have counted. After `watch_updates`.
    """
    setattr(variable, _MARK, method)


def _noticing(original: Any) -> Any:
    @functools.wraps(original)
    def _backend_update_step(self: Any, grads: Any, trainable_variables: Any, learning_rate: Any) -> Any:
        before = compared(self, grads, trainable_variables)
        with tf.control_dependencies(before):
            result = original(self, grads, trainable_variables, learning_rate)
        methods = [method for one in trainable_variables if (method := getattr(one, _MARK, None)) is not None]
        if methods:
            # Nothing else orders nodes in a branch of a graph, such as that of the last of several passes, behind those
            # before it: TensorFlow does so for its variables alone.
            with tf.control_dependencies([*before, *(gradient for gradient in grads if gradient is not None)]):
                for method in methods:
                    method()
        return result

    return _backend_update_step
