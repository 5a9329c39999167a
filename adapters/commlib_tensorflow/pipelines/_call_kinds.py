"""Kinds of calls: ranks of a pipeline agree on the kind of the next call before any of them starts it."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np

from commlib.communicator import Communicator
from commlib.dtypes import Array
from commlib.errors import MismatchError
from commlib.pipeline.batch import BatchDigests


class CallKind(IntEnum):
    """Kind of call that a rank is about to make."""

    TRAIN = 0
    EVALUATE = 1
    PREDICT = 2
    END_EPOCH = 3
    TRAIN_PARTS = 4


_WORDS = (
    "trains on a batch", "evaluates a batch", "predicts a batch", "has finished its epoch of fit",
    "trains on microbatches cut by the user (cut=False)",
)  # fmt: skip


def agree_on_kind(comm: Communicator, kind: CallKind, numbers: Sequence[int]) -> Array:
    """Return the numbers of each rank; all ranks pass equally many. Collective.

    Raises MismatchError on all ranks if their calls are of different kinds.
    """
    every = comm.all_gather(np.array([[kind, *numbers]], np.int64))
    kinds = {int(kind): rank for rank, kind in reversed(list(enumerate(every[:, 0])))}
    if len(kinds) > 1:
        first, other = sorted(kinds.items(), key=lambda item: item[1])[:2]
        raise MismatchError(
            f"pipeline: rank {first[1]} {_WORDS[first[0]]}, but rank {other[1]} {_WORDS[other[0]]} (this is rank "
            f"{comm.rank} of {comm.size}). All ranks must make the same calls with equally many batches, and a "
            "callback that stops training within an epoch must do so on all ranks"
        )
    return every[:, 1:]


def agree_to_stop(comm: Communicator, stops: bool, rate: float | None) -> bool:
    """Return whether any rank wants to stop after an epoch. Collective.

    rate: the learning rate; None if there is none. Raises MismatchError on all ranks if ranks have different rates.
    """
    own = [int(stops), rate is not None, int(np.float64(rate or 0.0).view(np.int64))]
    every = agree_on_kind(comm, CallKind.END_EPOCH, [*own, *BatchDigests()])
    rates = {rank: float(bits.view(np.float64)) for rank, bits in enumerate(every[:, 2]) if every[rank, 1]}
    if len(set(rates.values())) > 1:
        text = ", ".join(f"{value:g} on rank {rank}" for rank, value in rates.items())
        raise MismatchError(
            f"pipeline: ranks have different learning rates after an epoch of fit: {text} (this is rank "
            f"{comm.rank} of {comm.size}): all ranks need the callbacks that set it"
        )
    return bool(every[:, 0].any())
