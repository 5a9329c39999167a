"""Reading: optimizers of Keras take, from files of the whole model, what they keep of this rank's parts."""

from __future__ import annotations

import functools
from typing import Any

import keras

from commlib.sharding.sharding import Sharding
from commlib_tensorflow._keras_reduction import replace
from commlib_tensorflow._shards import shard_of
from commlib_tensorflow.pipelines._updates import lists_of
from commlib_tensorflow.tensor._in_files import Parts

_LOAD = "load_own_variables"


def watch_reading() -> None:
    """Let optimizers of divided weights read files of whole ones, from now on."""
    replace(next(kind for kind in keras.optimizers.Optimizer.__mro__ if _LOAD in vars(kind)), _LOAD, _taking_parts)


def _taking_parts(original: Any) -> Any:
    @functools.wraps(original)
    def load_own_variables(self: Any, store: Any) -> Any:
        weights = _weights_of(getattr(self, "inner_optimizer", self))
        if weights:
            store = Parts(store, [weights.get(id(variable), variable) for variable in self.variables])
        return original(self, store)

    return load_own_variables


def _weights_of(optimizer: Any) -> dict[int, Any]:
    """Return the divided weights for which an optimizer keeps variables of their shape, by what it keeps."""
    found = {}
    for variables in lists_of(optimizer).values():
        for weight, variable in zip(optimizer._trainable_variables, variables, strict=True):
            shard = shard_of(weight)
            if shard is None or not isinstance(shard.sharding, Sharding) or variable is None:
                continue
            if tuple(variable.shape) == tuple(weight.shape):
                found[id(variable)] = weight
    return found
