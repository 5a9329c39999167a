"""Signal handlers that raise anywhere in a message's code: messages arrive whole, or the group has failed."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import numpy as np
import pytest

from tests.bodies.at_each_call import raise_at
from tests.oracles.poison import poisoned

pytestmark = [pytest.mark.ranks(min=2), pytest.mark.any_ranks, pytest.mark.any_mpi]

CODE = "commlib/p2p/messages.py"
COUNT = 20_000  # too large for a lane: MPI reads them in place
LAST = -1.0


def send(group, verb, value):
    """Send an array that nobody else references."""
    x = poisoned(np.full(COUNT, value))
    if verb == "send":
        group.send(x, 1)
    elif verb == "send_async":
        group.send_async(x, 1).wait()
    else:
        group.send_recv(x, 1, np.zeros(COUNT), 1)


@pytest.mark.parametrize("verb", ["send", "send_async", "send_recv"])
def test_an_interrupted_send_of_memory_that_is_freed(comm, verb):
    """Its array was released between posting and waiting, and the received data belonged to other calls."""
    group, number, raised, over = comm.split(0), 0, True, []
    while raised:
        number += 1
        if comm.rank == 0:
            raised = raise_at(number, CODE, partial(send, group, verb, float(number)))
        elif comm.rank == 1:
            work = group.recv_async(np.zeros(COUNT), 0)
            if verb == "send_recv":
                group.send_async(np.zeros(COUNT), 0)
        raised, has_failed = comm.broadcast_object((raised, group.group.failure is not None))
        if comm.rank == 0 and not has_failed:
            group.send(np.full(COUNT, LAST), 1)
        if comm.rank == 1:
            received = wait_for_data(work, 0.02) if has_failed else work.wait(60)
            if received is not None:
                assert (received == received[0]).all() and received[0] in (number, LAST)
                assert has_failed or received[0] == LAST or (group.recv(np.zeros(COUNT), 0) == LAST).all()
        comm.barrier()
        if has_failed or verb == "send_recv":  # rank 0 may have received nothing of it
            over.append(group)
            group = comm.split(0)
    assert number > 1
    for group in over:
        group.close()  # with receives that are no longer answered


def append_work(results, take, out):
    results.append(take(out, 1))


def wait_for_data(work, seconds):
    """Return what a receive gets within so many seconds, or None."""
    deadline = time.monotonic() + seconds
    while not work.done() and time.monotonic() < deadline:
        time.sleep(1e-4)
    return work.wait() if work.done() and work.exception() is None else None


@pytest.mark.parametrize("is_async", [False, True])
def test_an_interrupted_recv_loses_nothing(comm, is_async):
    """For an asynchronous one, until it has been started: a wait for it may be repeated."""
    group, number, raised, over = comm.split(0), 0, True, []
    while raised:
        number += 1
        if comm.rank == 1:
            group.send_async(np.full(COUNT, float(number)), 0)
            group.send_async(np.full(COUNT, LAST), 0)
        elif comm.rank == 0:
            out, works = np.zeros(COUNT), list[Any]()
            take = group.recv_async if is_async else group.recv
            raised = raise_at(number, CODE, partial(append_work, works, take, out))
            if is_async and works:
                works[0].wait()
            if group.group.failure is None:
                assert (out == out[0]).all() and out[0] in (0, number)
                if out[0] == 0:
                    assert (group.recv(np.zeros(COUNT), 1) == number).all()
                assert (group.recv(np.zeros(COUNT), 1) == LAST).all()
        raised, has_failed = comm.broadcast_object((raised, group.group.failure is not None))
        if has_failed:
            over.append(group)
            group = comm.split(0)
    assert number > 1
    for group in over:
        group.close()
