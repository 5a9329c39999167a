"""Kinds: let all ranks of a pipeline be about the same thing before any of them begins with it."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np

from commlib.communicator import Communicator
from commlib.dtypes import Array
from commlib.errors import MismatchError


class Kind(IntEnum):
    """What a rank is about to do."""

    TRAIN = 0
    EVALUATE = 1
    PREDICT = 2
    END_EPOCH = 3
    TRAIN_PARTS = 4


_WORDS = (
    "trains on a batch", "evaluates a batch", "predicts a batch", "has ended its epoch of fit",
    "trains on microbatches that it is given (cut=False)",
)  # fmt: skip


def agreed(comm: Communicator, kind: Kind, numbers: Sequence[int]) -> Array:
    """Return the numbers of each rank, of which all have as many. Collective.

    Raises MismatchError on all ranks if they are about different things.
    """
    every = comm.all_gather(np.array([[kind, *numbers]], np.int64))
    kinds = {int(kind): rank for rank, kind in reversed(list(enumerate(every[:, 0])))}
    if len(kinds) > 1:
        first, other = sorted(kinds.items(), key=lambda item: item[1])[:2]
        raise MismatchError(
            f"pipeline: rank {first[1]} {_WORDS[first[0]]}, but rank {other[1]} {_WORDS[other[0]]} (this is rank "
            f"{comm.rank} of {comm.size}): all ranks make the same calls with as many batches, and a callback that "
            "stops training within an epoch does so on all of them"
        )
    return every[:, 1:]  # type: ignore[no-any-return]
