"""Messages on a node, between processes."""

from __future__ import annotations

import contextlib
import random

import numpy as np
import pytest

from commlib.errors import PeerError, ShutdownError
from tests.bodies import lanes
from tests.bodies.alarm import Alarm, alarm

pytestmark = [pytest.mark.ranks(min=2), pytest.mark.any_ranks]


@pytest.mark.parametrize("check", lanes.CHECKS, ids=lambda check: check.__name__)
def test_on_a_node(comm, check):
    group = comm.split(0)
    try:
        check(group)
    finally:
        comm.barrier()
    group.close()


LAST, STOP = -1, 77


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("count", [1, 3000, 20_000])
@pytest.mark.parametrize("is_sender", [True, False], ids=["send", "recv"])
def test_alarms_at_any_time(comm, count, is_sender):
    """Rank 0 is interrupted repeatedly: it loses nothing that it knows of, or the group has failed."""
    chance = random.Random(count)
    for _ in range(6):
        group = comm.split(0)
        group.barrier()  # from then on it has a board, by which the others learn of a failure
        if comm.rank == 0:
            step, out = 0, np.zeros(count)
            with contextlib.suppress(Alarm), alarm(chance.random() * 4e-3):
                while True:
                    if is_sender:
                        group.send(np.full(count, step + 1.0), 1)
                    else:
                        group.recv(out, 1)
                        assert (out == step + 1).all(), (out, step)
                    step += 1
            if group.group.failure is None and is_sender:
                group.send(np.full(count, float(LAST)), 1)
                group.send(np.full(count, float(step)), 1)
            elif group.group.failure is None:
                # A message that arrived with the alarm is in the array; otherwise it can still be received.
                last = step + 1 if (out == step + 1).all() else step
                comm.send(np.zeros(1), 1, STOP)
                while (group.recv(out, 1) != LAST).all():
                    assert (out == last + 1).all(), (out, last, step)
                    last += 1
            else:
                if not is_sender:
                    comm.send(np.zeros(1), 1, STOP)
                with pytest.raises(ShutdownError, match="ended half-way by Alarm"):
                    group.send(np.zeros(1), 1)
        elif comm.rank == 1:
            stop = None if is_sender else comm.recv_async(np.zeros(1), 0, STOP)
            with contextlib.suppress(PeerError):
                converse(group, count, stop)
            if stop is not None:
                stop.wait(60)
        comm.barrier()
    comm.barrier()


def converse(group, count, stop):
    """Play the rank that is not interrupted: send until `stop` is done, or receive."""
    step, out = 0, np.zeros(count)
    if stop is not None:
        while not stop.done() and group.group.failure is None and step < 10_000:
            step += 1
            group.send(np.full(count, float(step)), 0)
        stop.wait(60)
        if group.group.failure is None:
            group.send_async(np.full(count, float(LAST)), 0).wait(60)
        return
    while (group.recv(out, 0) != LAST).all():
        assert (out == step + 1).all(), (out, step)
        step += 1
    received = int(group.recv(out, 0)[0])
    assert step - received in (0, 1), "a message that was sent is lost, or was sent twice"
