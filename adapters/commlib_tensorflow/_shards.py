"""Sharded variables: mark a variable as holding a shard, and convert between shards and unsharded values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from commlib.dtypes import Array
from commlib.errors import UsageError
from commlib.sharding.shards import Shard

_MARK = "commlib_shard"
_OWN = "commlib_own"


def shard_of(variable: Any) -> Shard | None:
    """Return the shard that a Keras variable holds; None if it is not sharded."""
    return getattr(variable, _MARK, None)


def shards_of(variables: Iterable[Any]) -> list[Shard | None]:
    """Return the shard that each variable holds."""
    return [getattr(variable, _MARK, None) for variable in variables]


def mark(variable: Any, shard: Shard) -> None:
    """Record the shard that a variable holds."""
    setattr(variable, _MARK, shard)
    if not isinstance(variable, tf.Variable):  # code that differentiates by hand may pass the TensorFlow variable
        setattr(variable.value, _MARK, shard)


def mark_local(variable: Any) -> None:
    """Record that a variable belongs to this rank alone, and its gradient is not reduced."""
    setattr(variable, _OWN, True)


def is_marked_local(variable: Any) -> bool:
    """Return whether a Keras variable belongs to this rank alone."""
    return hasattr(variable, _OWN) or hasattr(variable.value, _OWN)


def mark_gradient(gradient: Any, variable: Any) -> None:
    """Mark the gradient of a sharded variable with its shard, for norms."""
    if gradient is not None and (shard := shard_of(variable)) is not None:
        setattr(gradient, _MARK, shard)


def whole_shape(variable: Any) -> tuple[int, ...]:
    """Return the unsharded shape of a variable."""
    shard = shard_of(variable)
    return tuple(variable.shape) if shard is None else shard.sharding.shape


def whole_of(variable: Any, value: Array) -> Array:
    """Gather a value of the shape of a variable, such as its own. Collective if the variable is sharded."""
    shard = shard_of(variable)
    if shard is None or value.shape != shard.sharding.local(shard.axis.rank, shard.axis.size):
        return value
    return shard.whole(value)


def own_of(variable: Any, value: Any) -> Any:
    """Return this rank's shard of an unsharded value. Raises UsageError for another shape."""
    shard = shard_of(variable)
    if shard is None:
        return value
    if tuple(value.shape) != shard.sharding.shape:
        raise UsageError(
            f"{variable.path}: got values of shape {tuple(value.shape)}, expected {shard.sharding.shape}, the shape in "
            "the unsharded model"
        )
    return shard.own(np.asarray(value[...]))


def take_counted(values: Any, shard: Shard | None) -> Any:
    """Return the elements of a shard, or of its gradient, that this rank counts: the first one counts shared ones."""
    dim, pieces = (0, None) if shard is None else shard.counted
    if pieces is None:
        return values
    front = (slice(None),) * dim
    return tf.concat([values[(*front, slice(*piece))] for piece in pieces or ((0, 0),)], dim)


def shards_in(model: Any) -> Iterator[tuple[Any, Shard]]:
    """Yield (variable, shard) of each sharded variable, once."""
    for variable in model.variables:
        if (shard := shard_of(variable)) is not None:
            yield variable, shard
