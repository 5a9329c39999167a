"""Dropped groups: none of their messages reaches a later group."""

from __future__ import annotations

import gc
import time

import numpy as np
import pytest

pytestmark = [pytest.mark.ranks(min=2), pytest.mark.any_ranks]


def test_farewells_of_a_failed_group_do_not_reach_a_later_one(comm):
    """MPICH gives a new communicator the number of a freed one, and with it the messages that nobody received."""
    for _ in range(3):
        group = comm.split(0)
        if comm.rank == 0:
            group.group.abandon("a call", OSError("out of luck"))
        del group
        gc.collect()
        comm.barrier()
    group = comm.split(0)
    if comm.rank == 0:
        time.sleep(2.5)  # the others poll once their wait is long
    assert (group.all_reduce(np.ones(5)) == comm.size).all()
