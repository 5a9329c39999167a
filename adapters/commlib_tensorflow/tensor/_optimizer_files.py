"""Reading: Keras optimizers take their state for this rank's shards from files of the unsharded model."""

from __future__ import annotations

import functools
from typing import Any

import keras

from commlib.sharding.sharding import Sharding
from commlib_tensorflow._keras_reduction import replace
from commlib_tensorflow._shards import shard_of
from commlib_tensorflow.pipelines._updates import lists_of
from commlib_tensorflow.tensor._file_layers import ShardReader

_LOAD = "load_own_variables"


def watch_reading() -> None:
    """Make optimizers of sharded weights read files of unsharded ones, from now on."""
    replace(next(kind for kind in keras.optimizers.Optimizer.__mro__ if _LOAD in vars(kind)), _LOAD, _wrap_load)


def _wrap_load(original: Any) -> Any:
    @functools.wraps(original)
    def load_own_variables(self: Any, store: Any) -> Any:
        weights = _weights_of(getattr(self, "inner_optimizer", self))
        if weights:
            store = ShardReader(store, [weights.get(id(variable), variable) for variable in self.variables])
        return original(self, store)

    return load_own_variables


def _weights_of(optimizer: Any) -> dict[int, Any]:
    """Return the sharded weights whose optimizer state has their shape, by the ids of the state's variables."""
    found = {}
    for variables in lists_of(optimizer).values():
        for weight, variable in zip(optimizer._trainable_variables, variables, strict=True):
            shard = shard_of(weight)
            if shard is None or not isinstance(shard.sharding, Sharding) or variable is None:
                continue
            if tuple(variable.shape) == tuple(weight.shape):
                found[id(variable)] = weight
    return found
