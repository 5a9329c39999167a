"""Waits for named operations: errors in the users' terms, with names, process sets, and the users' rank numbers."""

from __future__ import annotations

import re

import pytest

pytestmark = pytest.mark.any_mpi

HEAD = """
import sys, time
import numpy as np
import commlib
from commlib import horovod as hvd

def start(name=None, rows=3, **options):
    return hvd.start_allreduce([np.ones(rows)], [np.ones(rows)], name, op=hvd.Sum, **options)

def report(wait):
    try:
        wait()
    except commlib.CommlibError as error:
        print(f"\\n{type(error).__name__} on {hvd.rank()}: {error}", flush=True)
    else:
        print(f"\\nfine on {hvd.rank()}", flush=True)

hvd.init()
late = hvd.size() - 1
"""

# Of the coordinator's own exchanges, which no user has called.
INTERNAL = r"uint64|uint8|op=and|all_gather|all_reduce|call number|split\d"


@pytest.mark.parametrize(
    "ranks, node_path",
    [(2, "1"), pytest.param(3, "1", marks=pytest.mark.long), (3, "0"), pytest.param(4, "0", marks=pytest.mark.long)],
)
def test_an_exited_rank(mpirun, ranks, node_path):
    """It was "all_reduce of 1 x uint64, op=and", of "world.split1(0)" between nodes."""
    done = mpirun(
        ranks,
        HEAD
        + """
start("before").wait()
if hvd.rank() != late:
    report(start("a").wait)
    report(lambda: start("next"))
    time.sleep(1)
""",
        env={"COMMLIB_NODE_PATH": node_path},
    )
    assert done.returncode == 0, done.stderr
    assert not re.search(INTERNAL, done.stdout + done.stderr), done.stdout + done.stderr
    reason = (
        r"waited for a rank that will not come: "
        r"(rank \d has given up process set 0: it waited for ranks? [\d, ]+ in vain; )*"
    )
    reason += rf"rank {ranks - 1} has shut commlib down or left the program"
    last = rf"the last operation of all ranks was allreduce 'before', \d+ s ago, and rank {ranks - 1} has submitted"
    for rank in range(ranks - 1):
        for name in ("a", "next"):
            error_text = (
                rf"PeerError on {rank}: process set 0: allreduce '{name}': rank {rank}: {reason}; this rank waits "
            )
            error_text += rf"for 'a'; ('a' was submitted .*too; )?{last} nothing since; process set 0 cannot be used"
            assert re.search(error_text, done.stdout), done.stdout


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.long), 3])
def test_a_late_rank(mpirun, ranks):
    """It also learns that the others have given up, and need not wait for them in turn."""
    done = mpirun(
        ranks,
        HEAD
        + """
if hvd.rank() == late:
    time.sleep(4)
report(start("a").wait)
time.sleep(3)
""",
        env={"COMMLIB_STALL_WARNING": "0.7", "COMMLIB_TIMEOUT": "2"},
    )
    assert done.returncode == 0, done.stderr
    assert not re.search(INTERNAL, done.stdout + done.stderr), done.stdout + done.stderr
    state = rf"; not there yet: rank {ranks - 1}; this rank waits for 'a'; no operation of all ranks has run yet, and "
    state += rf"rank {ranks - 1} has submitted nothing"
    for rank in range(ranks - 1):
        begin = rf"process set 0: allreduce 'a': rank {rank}"
        assert re.search(
            rf"WARNING: {begin} has waited [12] s{state}; the diagnosis .*trace hang --now \w+\n", done.stderr
        ), done.stderr
        stalled = rf"StallError on {rank}: {begin}: gave up after 2 s \(COMMLIB_TIMEOUT\){state}; look at what the late"
        assert re.search(stalled, done.stdout), done.stdout
    reason = r"will not come: rank 0 has given up process set 0: it timed out waiting for 'a' \(COMMLIB_TIMEOUT\)"
    assert re.search(rf"PeerError on {ranks - 1}: process set 0: allreduce 'a': .*{reason}", done.stdout), done.stdout


def test_ranks_of_a_process_set_have_their_world_numbers(mpirun):
    """Rank 2 was called 1, its place in the set."""
    done = mpirun(
        3,
        HEAD
        + """
ends = hvd.add_process_set([1, 2])
if hvd.rank() == 1:
    report(start("a", process_set=ends).wait)
elif hvd.rank() == 2:
    time.sleep(3)
""",
        env={"COMMLIB_STALL_WARNING": "0.7", "COMMLIB_TIMEOUT": "2"},
    )
    assert done.returncode == 0, done.stderr
    assert "process set 1: allreduce 'a': rank 1 has waited 1 s; not there yet: rank 2;" in done.stderr, done.stderr
    assert re.search(r"StallError on 1: process set 1: allreduce 'a': rank 1: .* not there yet: rank 2;", done.stdout)


def test_each_pending_operation_gets_an_error_of_its_own(mpirun):
    """All of them raised the same exception, whose traceback grew each time."""
    done = mpirun(
        2,
        HEAD
        + """
if hvd.rank() == 1:
    time.sleep(2.5)
    sys.exit()
pair = [np.ones(3), np.ones(4)]
works = [start(f"n{i}") for i in range(6)] + [start(), hvd.start_barrier()]
works.append(hvd.start_allreduce(pair, pair, "group", op=hvd.Sum))
works.append(hvd.start_join())
errors = [work.exception() for work in works]
for error in errors:
    report(lambda: (_ for _ in ()).throw(error))
assert len(set(map(id, errors))) == len(errors)
""",
        env={"COMMLIB_TIMEOUT": "1.5"},
    )
    assert done.returncode == 0, done.stderr
    names = [*(f"n{i}" for i in range(6)), "allreduce.noname.0", "barrier.noname.0", "group", "join"]
    for name in names:
        error_text = rf"StallError on 0: process set 0: \w+ '{name}': rank 0: gave up .* not there yet: rank 1; "
        error_text += r"this rank waits for 'n0', 'n1', 'n2', 'n3', 'n4' and 5 more; no operation"
        assert re.search(error_text, done.stdout), (name, done.stdout)
