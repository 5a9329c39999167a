"""Groups that are dropped: their communicators are freed, unless a message of theirs may still come.

MPICH reuses the context of a freed communicator, and with it unreceived messages: a new group
received messages of an older group that had failed.
"""

from __future__ import annotations

import gc
import time
from typing import Any

import numpy as np
import pytest

from commlib.config.settings import Config
from tests.bodies.loopback import run


def healthy(group: Any) -> None:
    group.all_reduce(np.ones(3))


def failed(group: Any) -> None:
    if group.rank == 0:
        group.group.abandon("a call", OSError("out of luck"))


def long_wait(group: Any) -> None:
    """Rank 1 sends its calls to rank 0, which never waits for long, and so never looks for them."""
    if group.rank == 0:
        time.sleep(0.6)
    group.all_reduce(np.ones(3))


@pytest.mark.parametrize("use, freed", [(healthy, True), (failed, False), (long_wait, False)])
def test_a_dropped_group_is_freed_unless_messages_may_come(use, freed):
    """It is freed once all of its ranks have noted it."""

    def work(comm):
        group = comm.split(0)
        use(group)
        key = f"{comm.runtime.token}.{group.group.key}", 2
        del group
        noted: list[Any] = []

        def gather(notes: list[Any]) -> list[Any]:
            noted.extend(notes)
            return []  # so that nothing is freed

        for rank in range(2):  # a thread's collection does nothing while another thread collects
            comm.barrier()
            if rank == comm.rank:
                gc.collect()
                comm.runtime.retired.free(gather)
        comm.barrier()
        return key in noted

    is_noted = run(2, work, nodes=[0, 1], config=Config(timeout=20, stall_warning=0.2))
    assert all(is_noted) == freed, is_noted
