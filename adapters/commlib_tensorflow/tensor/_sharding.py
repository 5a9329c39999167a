"""Shard a Keras variable: the object stays the same, but holds one rank's shard, also when it is read from a file."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras

from commlib.sharding.axis import ParallelAxis
from commlib.sharding.sharding import Sharding
from commlib.sharding.shards import Shard
from commlib.tensor_parallel.checks.axis_equality import begin
from commlib.tensor_parallel.run.divisibility import Divisibility
from commlib_tensorflow._keras_reduction import replace
from commlib_tensorflow._shards import mark, shard_of, whole_shape
from commlib_tensorflow.pipelines._updates import lists_of
from commlib_tensorflow.tensor._constraints import check_constraint
from commlib_tensorflow.tensor._export_checks import watch_exports
from commlib_tensorflow.tensor._file_layers import ShardReader
from commlib_tensorflow.tensor._gathering import regularize_whole
from commlib_tensorflow.tensor._penalties import watch_penalties
from commlib_tensorflow.tensor.optimizing import watch_optimizers

Shardings = Sequence[tuple[Any, Sharding]]
"""Variables, and the sharding of each."""


def check_division(what: str, shardings: Shardings, division: Divisibility) -> None:
    """Raise UsageError unless variables of a layer can be sharded like this: a constraint must not need a full one."""
    for variable, sharding in shardings:
        is_whole = division.add(f"{what}: {variable.path}", variable, shard_of(variable), sharding)
        if is_whole:
            check_constraint(what, variable, sharding, division.axis.size)


@contextmanager
def report_unsharded_shape(variable: Any) -> Iterator[None]:
    """Make a sharded variable report its unsharded shape within the context."""
    own, variable._shape = variable._shape, whole_shape(variable)
    try:
        yield
    finally:
        variable._shape = own


def shard_variables(what: str, axis: ParallelAxis, shardings: Shardings) -> None:
    """Make Keras variables hold this rank's shard of their values: the same objects, with smaller tensors.

    A variable that several layers share is sharded once. Raises UsageError, before anything is changed, if one is
    already sharded differently, or has a constraint that needs the unsharded variable.
    """
    check_division(what, shardings, Divisibility(axis))
    watch_optimizers()
    watch_exports()
    watch_reading()
    watch_penalties()
    begin(axis)
    for variable, sharding in shardings:
        if shard_of(variable) is not None:
            continue  # tied
        shard = Shard(axis, sharding)
        own = shard.own(variable.numpy())
        # Keras' variables have a fixed shape, without a public way to change it. A new variable would not be the object
        # that an optimizer, a layer that shares it or a user's list refers to.
        variable._initialize(own)
        variable._shape = own.shape
        mark(variable, shard)
        regularize_whole(variable, shard)


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
    weights = {}
    for variables in lists_of(optimizer).values():
        for weight, variable in zip(optimizer._trainable_variables, variables, strict=True):
            shard = shard_of(weight)
            if shard is None or not isinstance(shard.sharding, Sharding) or variable is None:
                continue
            if tuple(variable.shape) == tuple(weight.shape):
                weights[id(variable)] = weight
    return weights
