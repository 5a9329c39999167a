"""Earlier optimizers of Keras: built before the variables were divided, they divide what they keep when they step."""

from __future__ import annotations

import functools
from typing import Any

import keras
import tensorflow as tf

from commlib_tensorflow._keras_reduction import replace
from commlib_tensorflow._shards import shard_of
from commlib_tensorflow.tensor.state import divide_optimizer

_CHECK = "_check_variables_are_known"


def watch_earlier_optimizers() -> None:
    """Let optimizers that are no model's, as those of loops of one's own, find variables again that are divided now."""
    kinds = [kind for kind in keras.optimizers.Optimizer.__mro__ if _CHECK in vars(kind)]
    for kind in kinds[:1]:  # none in a Keras that knows variables in another way
        replace(kind, _CHECK, _finding)


def _finding(original: Any) -> Any:
    @functools.wraps(original)
    def _check_variables_are_known(self: Any, variables: Any) -> Any:
        known = self._trainable_variables_indices
        if any(shard_of(variable) is not None and self._var_key(variable) not in known for variable in variables):
            with tf.init_scope():
                divide_optimizer(self)
        return original(self, variables)

    return _check_variables_are_known
