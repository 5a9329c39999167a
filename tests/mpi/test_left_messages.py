"""Unreceived messages: they do not reach a later communicator."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI


@pytest.mark.parametrize("how", ["dropped", "closed"])
@pytest.mark.ranks(min=2)
def test_a_freed_group_leaves_nothing_to_the_next_communicator(comm: Any, how: str) -> None:
    """MPICH gives a freed communicator's number to the next one, together with its unreceived messages.

    So a user's receive, in a communicator of its own, got the farewell of a channel, and its sender waited.
    """
    for _ in range(5):
        groups = [comm.split(0) for _ in range(3)]
        for group in groups:
            for peer in range(comm.size):
                if peer != comm.rank:
                    group.channel(peer, "edge", 4).close()
            group.send_async(np.ones(3), (comm.rank + 1) % comm.size, tag=7)
            if how == "closed":
                group.close()
        del group, groups
        gc.collect()
        comm.split(0)  # frees them
        own = [MPI.COMM_WORLD.Dup() for _ in range(4)]
        MPI.COMM_WORLD.Barrier()
        assert not any(one.Iprobe() for one in own for _ in range(20))
        for one in own:
            one.Free()
