"""Groups that nobody uses any more: nothing of them is heard in later ones."""

from __future__ import annotations

import gc
import time

import numpy as np
import pytest

pytestmark = [pytest.mark.ranks(min=2), pytest.mark.any_ranks]


def test_last_words_of_a_failed_group_are_not_heard_in_a_later_one(comm):
    """MPICH gives a new communicator the place of one that was freed, and with it the messages that nobody took."""
    for _ in range(3):
        group = comm.split(0)
        if comm.rank == 0:
            group.group.abandon("a call", OSError("out of luck"))
        del group
        gc.collect()
        comm.barrier()
    group = comm.split(0)
    if comm.rank == 0:
        time.sleep(2.5)  # the others listen once their wait is long
    assert (group.all_reduce(np.ones(5)) == comm.size).all()
