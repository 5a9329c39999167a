"""Variables that hold a shard: how one tells, and what of a whole is theirs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from commlib.dtypes import Array
from commlib.errors import UsageError
from commlib.sharding.shards import Shard

_MARK = "commlib_shard"
_OWN = "commlib_own"


def shard_of(variable: Any) -> Shard | None:
    """Return what a variable of Keras holds a part of; None if it is whole."""
    return getattr(variable, _MARK, None)


def mark(variable: Any, shard: Shard) -> None:
    """Note what a variable holds."""
    setattr(variable, _MARK, shard)
    if not isinstance(variable, tf.Variable):  # who differentiates by hand may give that of TensorFlow
        setattr(variable.value, _MARK, shard)


def leave_here(variable: Any) -> None:
    """Note that a variable is this rank's own, and its gradient is not reduced."""
    setattr(variable, _OWN, True)


def is_left_here(variable: Any) -> bool:
    """Return whether a variable of Keras is this rank's own."""
    return hasattr(variable, _OWN) or hasattr(variable.value, _OWN)


def mark_gradient(gradient: Any, variable: Any) -> None:
    """Note that a gradient is of a variable that holds a part, if it does: who takes a norm of it asks."""
    if gradient is not None and (shard := shard_of(variable)) is not None:
        setattr(gradient, _MARK, shard)


def whole_shape(variable: Any) -> tuple[int, ...]:
    """Return the shape that a variable has in one process."""
    shard = shard_of(variable)
    return tuple(variable.shape) if shard is None else shard.sharding.shape


def whole_of(variable: Any, value: Array) -> Array:
    """Return a value of the shape of a variable, such as its own, as a whole. Collective if the variable is divided."""
    shard = shard_of(variable)
    if shard is None or value.shape != shard.sharding.local(shard.axis.rank, shard.axis.size):
        return value
    return shard.whole(value)


def own_of(variable: Any, value: Any) -> Any:
    """Return this rank's part of a whole value. Raises UsageError for another shape."""
    shard = shard_of(variable)
    if shard is None:
        return value
    if tuple(value.shape) != shard.sharding.shape:
        raise UsageError(
            f"{variable.path} is given values of shape {tuple(value.shape)}, expected {shard.sharding.shape}, that of "
            "the model that is whole"
        )
    return shard.own(np.asarray(value[...]))


def counted(values: Any, shard: Shard | None) -> Any:
    """Return what of a part, or of its gradient, counts here: what several ranks have, on the first of them."""
    dim, pieces = (0, None) if shard is None else shard.counted
    if pieces is None:
        return values
    front = (slice(None),) * dim
    return tf.concat([values[(*front, slice(*piece))] for piece in pieces or ((0, 0),)], dim)


def shards_in(model: Any) -> Iterator[tuple[Any, Shard]]:
    """Yield (variable, shard) of each variable that is divided, once."""
    for variable in model.variables:
        if (shard := shard_of(variable)) is not None:
            yield variable, shard
