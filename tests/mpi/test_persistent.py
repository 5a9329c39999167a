"""Persistent messages: set up once, and abandoned in flight."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.any_ranks


class GiveUp(Exception):
    pass


def give_up() -> None:
    raise GiveUp


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("count", [10, 1_000_000])
def test_an_abandoned_message_writes_nothing(comm: Any, count: int) -> None:
    """A late message was written into freed memory: Open MPI crashed at the end of the job."""
    transport = comm.group.transport.split(0, comm.rank)
    if comm.rank == 0:
        landing, outgoing = np.zeros(count, np.uint8), np.zeros(4, np.uint8)
        prepared = transport.persistent_round([(1, [outgoing.data])], [(1, [landing.data])], 7)
        with pytest.raises(GiveUp):
            prepared.run(give_up)
        del prepared
        comm.barrier()
        arrived = np.zeros(count, np.uint8)
        transport.wait([transport.recv(1, 7, arrived.data)], lambda: None)
        assert (arrived == 9).all() and not landing.any()
    else:
        comm.barrier()
        if comm.rank == 1:
            transport.wait([transport.send(0, 7, np.full(count, 9, np.uint8).data)], lambda: None)
            transport.wait([transport.recv(0, 7, np.zeros(4, np.uint8).data)], lambda: None)
    comm.barrier()
    transport.close()
