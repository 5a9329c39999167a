"""Optimizers built before their variables were sharded: they shard their state at the next step."""

from __future__ import annotations

import functools
from typing import Any

import keras
import tensorflow as tf

from commlib_tensorflow._keras_reduction import replace
from commlib_tensorflow._shards import shard_of
from commlib_tensorflow.tensor.state import shard_optimizer

_CHECK = "_check_variables_are_known"


def watch_earlier_optimizers() -> None:
    """Make optimizers outside of a model, as in custom training loops, find their variables again after sharding."""
    kinds = [kind for kind in keras.optimizers.Optimizer.__mro__ if _CHECK in vars(kind)]
    for kind in kinds[:1]:  # a Keras without this method needs no change
        replace(kind, _CHECK, _wrap_known_check)


def _wrap_known_check(original: Any) -> Any:
    @functools.wraps(original)
    def _check_variables_are_known(self: Any, variables: Any) -> Any:
        known = self._trainable_variables_indices
        if any(shard_of(variable) is not None and self._var_key(variable) not in known for variable in variables):
            with tf.init_scope():
                shard_optimizer(self)
        return original(self, variables)

    return _check_variables_are_known
