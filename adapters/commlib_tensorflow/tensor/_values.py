"""Values of variables: every rank of an axis takes those of its rank 0."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf

from commlib.communicator import Communicator
from commlib.comparison.parameter_check import check_agreement
from commlib.errors import UsageError
from commlib.sharding.shards import others_of, world_ranks
from commlib_tensorflow._shards import shard_of


def take_values_of_rank_0(what: str, variables: Iterable[Any], comm: Communicator) -> None:
    """Give variables of Keras the values that they have on rank 0. Collective.

    Those that are divided among ranks of `comm` already stay as they are: each rank has another part.
    Raises MismatchError on all ranks for other shapes, UsageError while a function or a model is traced: the variables
    have no values then.
    """
    if not tf.executing_eagerly():
        raise UsageError(f"{what} is built while a function is traced: call the model once on some data before")
    ranks = world_ranks(comm)
    own = [one for one in variables if (shard := shard_of(one)) is None or not others_of(shard, ranks)]
    check_agreement(comm, what, [f"{variable.dtype}{tuple(variable.shape)}" for variable in own])
    for variable in own:
        variable.assign(comm.broadcast(np.array(variable.numpy())))  # a number may be read-only


@contextmanager
def values_of_rank_0(what: str, variables: Sequence[Any], comm: Communicator) -> Iterator[None]:
    """Give variables the values that they have on rank 0, and their own again if what follows raises. Collective."""
    before = [variable.numpy() for variable in variables]
    take_values_of_rank_0(what, variables, comm)
    own = [(variable, value) for variable, value in zip(variables, before, strict=True) if _differs(variable, value)]
    del before
    try:
        yield
    except BaseException:
        for variable, value in own:
            variable.assign(value)
        raise


def _differs(variable: Any, value: Any) -> bool:
    return bool(np.any(variable.numpy() != value))
