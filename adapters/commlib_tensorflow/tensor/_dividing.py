"""Divide a variable of Keras: it is the same object from then on, with one rank's part of its values."""

from __future__ import annotations

from typing import Any

from commlib.errors import UsageError
from commlib.functional.axis import Axis
from commlib.functional.shards import Shard
from commlib.tensor.sharding import Sharding
from commlib_tensorflow._shards import mark, shard_of
from commlib_tensorflow.tensor.optimizing import watch_optimizers


def divide(what: str, variable: Any, axis: Axis, sharding: Sharding) -> None:
    """Let a variable of Keras hold this rank's part of its values: the same object, with a smaller tensor.

    A variable that several layers share is divided once. Raises UsageError if it is divided otherwise already, or has
    a constraint, which may look at the whole.
    """
    watch_optimizers()
    shard = Shard(axis, sharding)
    before = shard_of(variable)
    if before is not None:
        if before.axis is axis and before.sharding == sharding:
            return  # tied
        raise UsageError(
            f"{what}: {variable.path} is divided already, as {before.sharding}: tied weights need one style"
        )
    sharding.check(f"{what}: {variable.path}", axis.size)
    if variable.constraint is not None:
        raise UsageError(f"{what}: {variable.path} has a constraint, which would see this rank's part alone: remove it")
    own = shard.own(variable.numpy())
    # Keras' variables have a fixed shape, and no public way to another one. A new variable would not be the one that
    # an optimizer, a layer that shares it or a user's list has.
    variable._initialize(own)
    variable._shape = own.shape
    mark(variable, shard)
