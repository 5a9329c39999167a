"""Signal handlers that raise in a wait for a named operation: it continues, or the set reports failure."""

from __future__ import annotations

import re

import pytest

pytestmark = pytest.mark.any_mpi

HEAD = """
import faulthandler, random, signal, sys, time
import numpy as np
import commlib
from commlib import horovod as hvd

class Alarm(Exception):
    pass

def raise_alarm(*_):
    raise Alarm("time is up")

def start(name, value=1.0, **options):
    x = np.full(3, value)
    return hvd.start_allreduce([x], [np.empty(3)], name, op=hvd.Sum, **options)

faulthandler.dump_traceback_later(40, exit=True)
hvd.init()
rank, size = hvd.rank(), hvd.size()
last = size - 1
start("before").wait()
signal.signal(signal.SIGALRM, raise_alarm)
"""


@pytest.mark.parametrize("ranks, node_path", [(2, "1"), (3, "0")])
def test_an_interrupt_while_others_are_late(mpirun, ranks, node_path):
    """The others were notified only in the call after it; between nodes they waited for ever."""
    done = mpirun(
        ranks,
        HEAD
        + """
if rank == last:
    signal.setitimer(signal.ITIMER_REAL, 0.4)
    work = start("x", blocking=True)
    try:
        work.wait()
    except Alarm:
        print("\\nraised here", flush=True)
else:
    time.sleep(1)
    work = start("x")
for ask in (lambda: work, lambda: start("next")):
    try:
        print(f"\\nfine on {rank}: {ask().wait()[0][0]}", flush=True)
    except commlib.PeerError as error:
        print(f"\\nPeerError on {rank}: {error}", flush=True)
time.sleep(2)
""",
        env={"COMMLIB_NODE_PATH": node_path},
    )
    assert done.returncode == 0, done.stderr
    assert "raised here" in done.stdout
    for name in ("x", "next"):
        begin = f"PeerError on {ranks - 1}: process set 0: allreduce '{name}': rank {ranks - 1}: interrupted by Alarm: "
        assert begin + "time is up, and out of step with the other ranks since" in done.stdout, done.stdout
        for rank in range(ranks - 1):
            error = (
                rf"PeerError on {rank}: process set 0: allreduce '{name}': rank {rank}: waited for a rank that will "
            )
            error += rf"not come: (.*; )?rank {ranks - 1} has given up process set 0: it was interrupted by Alarm: time"
            assert re.search(error, done.stdout), done.stdout


def test_an_interrupt_between_cycles_loses_nothing(mpirun):
    """Both ranks wait, for different names: no cycle is in progress for most of the time."""
    done = mpirun(
        2,
        HEAD
        + """
coordinator = hvd.global_process_set.coordinator("test")
mine = start("a" if rank == 0 else "b", 2.0, blocking=rank == 1)
if rank == 1:
    group = coordinator.comm.group
    looks = group.is_awaited  # between two cycles, again and again

    def interrupted():
        if coordinator.cycles > 6:
            group.is_awaited = looks
            raise_alarm()
        return looks()

    group.is_awaited = interrupted
    try:
        mine.wait()
    except Alarm:
        print("\\nraised here", flush=True)
    assert not mine.done()
    other = start("a", 5.0)
else:
    time.sleep(2)
    other = start("b", 3.0)
assert mine.wait()[0][0] == (7 if rank == 0 else 5) and other.wait()[0][0] == (5 if rank == 0 else 7)
print(f"\\nfine on {rank}", flush=True)
""",
    )
    assert done.returncode == 0, done.stderr
    assert "raised here" in done.stdout and done.stdout.count("fine on") == 2, done.stdout


@pytest.mark.parametrize("node_path", ["1", pytest.param("0", marks=pytest.mark.long)])
def test_a_signal_at_any_moment(mpirun, node_path):
    """Every result is correct, or the set has failed on all ranks and reports it; nothing hangs."""
    done = mpirun(
        2,
        HEAD
        + """
from commlib.coordinator import Coordinator, OpRequest

rng = random.Random(rank)
world = commlib.world()
outcomes = []
for trial in range(12):
    coordinator = Coordinator(world.split(0), range(size))
    steps = interrupts = 0
    for step in range(60):
        x, y = np.full(3, float(step + rank)), np.full(500, 1.0)
        try:  # an alarm after both are done is raised by the next submission
            work, other = [
                coordinator.submit(OpRequest("allreduce", name, (("float64", a.shape),), (("op", "sum"),)), [a], [a])
                for name, a in (("x", x), (f"y{step % 3}", y))
            ]
            try:
                if rank == last and step >= 2 * trial:
                    signal.setitimer(signal.ITIMER_REAL, 1e-5 + rng.random() * 5e-4)
                work.wait()
                other.wait()
            except Alarm:
                interrupts += 1
            try:
                signal.setitimer(signal.ITIMER_REAL, 0)
            except Alarm:
                interrupts += 1
            work.wait()
            other.wait()
        except commlib.CommlibError as error:
            assert type(error) is commlib.PeerError and "Alarm: time is up" in str(error), error
            break
        assert (x == size * step + sum(range(size))).all() and (y == size).all(), (step, x, y)
        steps += 1
    outcomes.append((steps == 60, interrupts))
    others = world.all_gather_object(steps == 60)
    assert len(set(others)) == 1, others
print(f"\\n{rank} ends: {sum(fine for fine, _ in outcomes)} fine, {sum(n for _, n in outcomes)} interrupts", flush=True)
""",
        env={"COMMLIB_NODE_PATH": node_path},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("ends") == 2, done.stdout
    assert re.search(r"1 ends: \d+ fine, [1-9]\d* interrupts", done.stdout), done.stdout


def test_a_rank_that_caught_the_interrupt_may_exit(mpirun):
    """The job was aborted at its end, because of a failed operation that no rank had requested."""
    done = mpirun(
        2,
        HEAD
        + """
if rank == last:
    signal.setitimer(signal.ITIMER_REAL, 0.3)
else:
    time.sleep(1)
try:
    start("x", blocking=True).wait()
except (Alarm, commlib.PeerError) as error:
    print(f"\\n{type(error).__name__} on {rank}", flush=True)
""",
    )
    assert done.returncode == 0, done.stderr
    assert "Alarm on 1" in done.stdout and "PeerError on 0" in done.stdout, done.stdout
