"""Progress of messages while a rank waits in shared memory, whatever remains unreceived."""

from __future__ import annotations

import time

import numpy as np
import pytest
from mpi4py import MPI

pytestmark = pytest.mark.any_ranks


@pytest.mark.ranks(min=2)
def test_an_unreceived_message_blocks_no_other(comm):
    """A probe that finds a message at once makes no progress: a user's large send to a waiting rank hung."""
    group, world = comm.split(0), MPI.COMM_WORLD.Dup()
    group.barrier()
    if comm.rank == 1:
        unreceived = group.send_async(np.ones(3), 0, tag=99)  # remains on rank 0, in the group's own communicator
    if comm.rank == 0:
        while not group.native.Iprobe(source=1):
            time.sleep(0.01)
        receiving = world.Irecv(into := np.zeros(200_000), 1)
        group.barrier()  # waits for rank 1 on the board, and must progress the message meanwhile
        receiving.Wait()
        assert (into == 7).all()
        assert (group.recv(np.zeros(3), 1, tag=99) == 1).all()
    elif comm.rank == 1:
        time.sleep(0.2)
        world.Send(np.full(200_000, 7.0), 0)
        group.barrier()
        unreceived.wait()
    else:
        group.barrier()
    world.Free()
