"""Signal handlers that raise in the middle of a call: the group reports failure, and never continues half-way."""

from __future__ import annotations

import contextlib
import random
import signal
import time

import numpy as np
import pytest

from commlib.errors import PeerError, ShutdownError, UsageError
from tests.bodies.alarm import Alarm, alarm
from tests.oracles.poison import poisoned

pytestmark = [pytest.mark.ranks(min=2), pytest.mark.any_ranks]


CALLS = {
    "small": lambda c: c.all_reduce(np.ones(3)),
    "large": lambda c: c.all_reduce(np.ones(300_000)),
    "broadcast": lambda c: c.broadcast(np.ones(5000), c.size - 1),
    "all_gather_v": lambda c: c.all_gather_v(np.ones(100)),
    "barrier": lambda c: c.barrier(),
    "objects": lambda c: c.all_gather_object("here"),
    "by a schedule": lambda c: c.all_reduce(np.ones(5000), algorithm="ring"),
    "small by a schedule": lambda c: c.all_reduce(np.ones(5), algorithm="recursive_doubling"),
    "plan": lambda c: c.plan_all_reduce(np.ones(5000))(),
    "begun": lambda c: c.all_reduce_async(np.ones(3)).wait(),
}

# These block in MPI.
UNSTOPPABLE = {
    "native": lambda c: c.all_reduce(np.ones(5), algorithm="native"),
    "split": lambda c: c.split(0),
    "empty": lambda c: c.empty(100),
}


class Meanwhile:
    """Holds back the other ranks of a group until rank 0 has been interrupted."""

    def __init__(self, comm):
        self.comm = comm

    def interrupt(self, group, call):
        """Make a call that no other rank makes, and raise Alarm in the middle of it."""
        busy = 0

        def ring(*_):
            nonlocal busy
            progress = group.group.progress
            busy += bool(progress.pending or progress.running.locked())
            if busy == 5:
                raise Alarm

        before = signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
        try:
            with pytest.raises(Alarm) as caught:
                call()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        self.comm.barrier()
        return caught.value


@pytest.mark.parametrize("name", CALLS)
def test_an_interrupted_wait_fails_the_group_on_all_ranks(comm, name):
    """The next call gave 1001 instead of 2, or hung, because the interrupted one was still half-way."""
    group = comm.split(0)
    CALLS[name](group)
    comm.barrier()
    if group.rank == 0:
        error = Meanwhile(comm).interrupt(group, lambda: CALLS[name](group))
        assert any("the group runs no more calls" in note for note in error.__notes__)
        depths = set()
        for _ in range(20):
            with pytest.raises(ShutdownError, match=r"rank 0: ended half-way by Alarm") as caught:
                group.all_reduce(np.ones(3))
            assert any(
                "all_reduce of 3 x float64" in note and "not run on rank 0" in note for note in caught.value.__notes__
            )
            depths.add(len(caught.traceback))
        assert max(depths) < 16  # not the same error every time, whose traceback would grow
    else:
        comm.barrier()
        with pytest.raises(PeerError, match=r"rank 0 has given up this group .*ended half-way by Alarm"):
            for _ in range(2):  # messages already sent by the interrupted rank may be enough for the first one
                CALLS[name](group)
    comm.barrier()


@pytest.mark.parametrize("name", UNSTOPPABLE)
def test_a_call_blocked_in_mpi_is_interrupted_once_it_ends(comm, name):
    group = comm.split(0)
    comm.barrier()
    if group.rank == 0:
        start = time.monotonic()
        with alarm(0.3, again=0), pytest.raises(Alarm):
            UNSTOPPABLE[name](group)
        assert time.monotonic() - start > 0.9
    else:
        time.sleep(1)
        UNSTOPPABLE[name](group)
    assert (group.all_reduce(np.ones(3)) == comm.size).all()


def test_an_interrupted_call_behind_others_in_the_queue(comm):
    """Its arrays were freed, and the queue still used them: SIGSEGV."""
    group = comm.split(0)
    x = np.full(100_000, 1.0)
    group.all_reduce(x)
    comm.barrier()
    if group.rank == 0:
        work = group.all_reduce_async(x)
        Meanwhile(comm).interrupt(group, lambda: group.all_reduce(poisoned(x), out=poisoned(x)))
        if work.exception() is None:  # the others arrived before it saw that the group had failed
            assert (work.wait() == comm.size).all()
        else:
            assert isinstance(work.exception(), ShutdownError)
    else:
        comm.barrier()
        with pytest.raises(PeerError):
            for _ in range(3):
                group.all_reduce(x)
    comm.barrier()


def test_a_wait_for_a_work_can_be_interrupted_and_repeated(comm):
    x = np.full(5000, 1.0)
    comm.barrier()
    if comm.rank == 0:
        work = comm.all_reduce_async(x)
        with alarm(0.1), pytest.raises(Alarm):
            work.wait()
    else:
        time.sleep(0.3)
        work = comm.all_reduce_async(x)
    assert (work.wait() == comm.size).all()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("algorithm", "count"),
    [
        pytest.param("auto", 1, marks=pytest.mark.any_mpi),
        pytest.param("auto", 2000, marks=[pytest.mark.any_mpi, pytest.mark.long]),
        pytest.param("recursive_doubling", 1, marks=pytest.mark.long),
        ("recursive_doubling", 2000),
    ],
)
def test_alarms_at_any_time(comm, count, algorithm):
    """Rank 0 is interrupted repeatedly; its calls give what the others' do, or the group has failed."""
    chance = random.Random(count)
    group, step, failed = comm.split(0), 0, 0
    for _ in range(6):
        # Rank 0 adds nothing, so the sum shows which call it joined.
        if comm.rank == 0:
            with contextlib.suppress(Alarm), alarm(chance.random() * 5e-3):
                while True:
                    total = group.all_reduce(np.zeros(count), algorithm=algorithm)
                    now = int(total[0]) // (comm.size - 1)
                    assert (total == now * (comm.size - 1)).all() and now - step in (1, 2), (now, step)
                    step = now
            if group.group.failure is None:
                group.all_reduce(np.full(count, -1e9), algorithm=algorithm)
        else:
            try:
                while True:
                    step += 1
                    if (group.all_reduce(np.full(count, float(step)), algorithm=algorithm) < 0).all():
                        break
            except PeerError as error:
                assert "ended half-way by Alarm" in str(error)
        if not all(comm.all_gather_object(group.group.failure is None)):
            group, failed = comm.split(0), failed + 1
        step = comm.broadcast_object(step, comm.size - 1)
    assert failed


def test_an_interrupted_recv_takes_no_later_message(comm):
    """It remained posted, and the next message went into its array."""
    comm.barrier()
    if comm.rank == 0:
        lost, received = np.zeros(5), np.zeros(5)
        with alarm(0.1, again=0), pytest.raises(Alarm):
            comm.recv(lost, 1)
        comm.barrier()
        comm.recv(received, 1)
        assert (received == 7).all() and (lost == 0).all()
    else:
        comm.barrier()
        if comm.rank == 1:
            comm.send(np.full(5, 7.0), 0)
    comm.barrier()


def test_an_interrupted_send_fails_the_group(comm):
    """The other rank may already have a part of it."""
    group = comm.split(0)
    if comm.rank == 0:
        x = poisoned(np.ones(3_000_000))
        with alarm(0.2, again=0), pytest.raises(Alarm):
            group.send(x, 1)
        del x
        with pytest.raises(ShutdownError, match="send to rank 1"):
            group.send(np.ones(3), 1)
    comm.barrier()


@pytest.mark.parametrize("name", ["small", "by a schedule", "small by a schedule"])
def test_a_call_in_a_signal_handler_that_interrupts_another_is_refused(comm, name):
    """It waited for ever for the call that it had interrupted."""
    group = comm.split(0)
    CALLS[name](group)
    comm.barrier()
    refused = []

    def ring(*_):
        for call in CALLS:
            try:
                CALLS[call](group)
            except UsageError as error:
                refused.append(str(error))

    if comm.rank == 0:
        before = signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        CALLS[name](group)
        signal.signal(signal.SIGALRM, before)
        assert len(refused) == len(CALLS) and all("in the middle of another call" in text for text in refused)
    else:
        time.sleep(0.5)
        CALLS[name](group)
    assert (group.all_reduce(np.ones(3)) == comm.size).all()
