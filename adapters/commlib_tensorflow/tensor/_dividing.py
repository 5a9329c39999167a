"""Divide a variable of Keras: it is the same object from then on, with one rank's part of its values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from commlib.sharding.axis import Axis
from commlib.sharding.sharding import Sharding
from commlib.sharding.shards import Shard
from commlib.tensor_parallel.checks.alike import begin
from commlib.tensor_parallel.run.division import Division
from commlib_tensorflow._shards import mark, shard_of, whole_shape
from commlib_tensorflow.tensor._constraints import check_constraint
from commlib_tensorflow.tensor._exporting import watch_exports
from commlib_tensorflow.tensor._gathering import regularize_whole
from commlib_tensorflow.tensor._penalties import watch_penalties
from commlib_tensorflow.tensor._reading import watch_reading
from commlib_tensorflow.tensor.optimizing import watch_optimizers

Shardings = Sequence[tuple[Any, Sharding]]
"""Variables, and how each is divided."""


def check_division(what: str, shardings: Shardings, division: Division) -> None:
    """Raise UsageError unless variables of a layer can be divided so: not with a constraint that needs all of one."""
    for variable, sharding in shardings:
        is_whole = division.add(f"{what}: {variable.path}", variable, shard_of(variable), sharding)
        if is_whole:
            check_constraint(what, variable, sharding, division.axis.size)


@contextmanager
def as_whole(variable: Any) -> Iterator[None]:
    """Let a variable that is divided tell its whole shape, for a while, to what only asks for that."""
    own, variable._shape = variable._shape, whole_shape(variable)
    try:
        yield
    finally:
        variable._shape = own


def divide(what: str, axis: Axis, shardings: Shardings) -> None:
    """Let variables of Keras hold this rank's part of their values: the same objects, with smaller tensors.

    A variable that several layers share is divided once. Raises UsageError, before anything is changed, if one is
    divided otherwise already, or has a constraint that needs the whole.
    """
    check_division(what, shardings, Division(axis))
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
        # Keras' variables have a fixed shape, and no public way to another one. A new variable would not be the one
        # that an optimizer, a layer that shares it or a user's list has.
        variable._initialize(own)
        variable._shape = own.shape
        mark(variable, shard)
        regularize_whole(variable, shard)
