"""Values of variables: every rank of an axis takes rank 0's values."""

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


def broadcast_rank_0_values(what: str, variables: Iterable[Any], comm: Communicator) -> None:
    """Assign rank 0's values to Keras variables on all ranks. Collective.

    Variables that are already sharded over ranks of `comm` are not changed: each rank has another shard. Raises
    MismatchError on all ranks for different shapes, UsageError while a function or a model is traced, because variables
    have no values then.
    """
    if not tf.executing_eagerly():
        raise UsageError(f"{what} is built while a function is traced: call the model once on some data first")
    ranks = world_ranks(comm)
    own = [one for one in variables if (shard := shard_of(one)) is None or not others_of(shard, ranks)]
    check_agreement(comm, what, [f"{variable.dtype}{tuple(variable.shape)}" for variable in own])
    for variable in own:
        variable.assign(comm.broadcast(np.array(variable.numpy())))  # a scalar may be read-only


@contextmanager
def use_rank_0_values(what: str, variables: Sequence[Any], comm: Communicator) -> Iterator[None]:
    """Assign rank 0's values to variables, and restore their own if the body raises. Collective."""
    before = [variable.numpy() for variable in variables]
    broadcast_rank_0_values(what, variables, comm)
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
