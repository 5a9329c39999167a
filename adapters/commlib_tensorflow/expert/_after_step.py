"""Call methods once an optimizer of Keras has updated a variable."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras

from commlib_tensorflow._keras_reduction import replace

_MARK = "commlib_after_step"


def call_after_step(variable: Any, method: Callable[[], None]) -> None:
    """Let a method be called after each update of a variable, in the graph that updates it."""
    setattr(variable, _MARK, method)
    name = "_backend_update_step"
    replace(next(kind for kind in keras.optimizers.Optimizer.__mro__ if name in vars(kind)), name, _noticing)


def _noticing(original: Any) -> Any:
    @functools.wraps(original)
    def _backend_update_step(self: Any, grads: Any, trainable_variables: Any, learning_rate: Any) -> Any:
        result = original(self, grads, trainable_variables, learning_rate)
        for variable in trainable_variables:
            method = getattr(variable, _MARK, None)
            if method is not None:
                method()
        return result

    return _backend_update_step
