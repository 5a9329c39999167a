"""Variables that hold a shard: how they become that, and how one tells."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from commlib.errors import UsageError
from commlib.functional.axis import Axis
from commlib.functional.shards import Shard
from commlib.tensor.sharding import Sharding

_MARK = "commlib_shard"


def shard_of(variable: Any) -> Shard | None:
    """Return what a variable of Keras holds a part of; None if it is whole."""
    return getattr(variable, _MARK, None)


def divide(what: str, variable: Any, axis: Axis, sharding: Sharding) -> None:
    """Let a variable of Keras hold this rank's part of its values: the same object, with a smaller tensor.

    A variable that several layers share is divided once. Raises UsageError if it is divided otherwise already, or has
    a constraint, which may look at the whole.
    """
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
    setattr(variable, _MARK, shard)


def shards_in(model: Any) -> Iterator[tuple[Any, Shard]]:
    """Yield (variable, shard) of each variable that is divided, once."""
    for variable in model.variables:
        if (shard := shard_of(variable)) is not None:
            yield variable, shard
