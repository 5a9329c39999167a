"""Named operations from outside: idle jobs, ranks that do not come, and starting again."""

from __future__ import annotations

import re

HEAD = """
import sys, time
import numpy as np
import commlib
from commlib import horovod as hvd

def reduce(name, rows=3):
    return hvd.start_allreduce([np.ones(rows)], [np.ones(rows)], name, op=hvd.Sum)
"""


def test_who_waits_or_idles_burns_no_core(mpirun):
    """A poll every millisecond, as Horovod has it, takes some per cent of a core on each rank, always."""
    done = mpirun(
        2,
        HEAD
        + """
hvd.init()
reduce("x").wait()
reduce("x")  # on the thread, so that it is there
time.sleep(0.2)

def share(seconds):
    start = time.process_time()
    time.sleep(seconds)
    return (time.process_time() - start) / seconds

hvd.start_barrier().wait()
idle = share(1.0)
hvd.start_barrier().wait()
work = reduce("late") if hvd.rank() == 0 else None  # rank 1 asks for nothing for a while
waiting = share(1.5)
work = work or reduce("late")
work.wait()
hvd.start_barrier().wait()
works = [reduce(name) for name in (("a", "b") if hvd.rank() == 0 else ("b",))]  # both wait, for different things
crossed = share(1.5)
if hvd.rank() == 1:
    works.append(reduce("a"))
[work.wait() for work in works]
print(f"\\nshares {idle:.4f} {waiting:.4f} {crossed:.4f}")
""",
    )
    assert done.returncode == 0, done.stderr
    shares = [tuple(map(float, line.split()[1:])) for line in done.stdout.splitlines() if line.startswith("shares")]
    assert len(shares) == 2
    for idle, waiting, crossed in shares:
        assert idle < 0.005
        assert waiting < 0.1
        assert crossed < 0.1


def test_a_rank_that_does_not_come_is_named_with_what_it_did_last(mpirun):
    done = mpirun(
        2,
        HEAD
        + """
hvd.init()
reduce("before").wait()
if hvd.rank() == 1:
    time.sleep(2)
reduce("x").wait()
""",
        env={"COMMLIB_STALL_WARNING": "0.5"},
    )
    assert done.returncode == 0, done.stderr
    assert re.search(
        r"commlib WARNING: process set 0: .*rank 0 has waited [01] s; not there yet: rank 1; this rank waits for 'x'; "
        r"the last operation of all ranks was allreduce 'before', [01] s ago",
        done.stderr,
    ), done.stderr


def test_ranks_that_ask_for_different_names_are_told(mpirun):
    done = mpirun(
        2,
        HEAD
        + """
hvd.init()
try:
    reduce(f"step{hvd.rank()}").wait()
except commlib.StallError as error:
    print(f"\\nrank {hvd.rank()}: {error}")
reduce("both").wait()
""",
        env={"COMMLIB_TIMEOUT": "1"},
    )
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert re.search(
            rf"rank {rank}: process set 0: allreduce 'step{rank}': rank {rank}: not asked for by rank {1 - rank}; "
            rf"rank {1 - rank} waits for ('step{1 - rank}'|nothing|'both')",
            done.stdout,
        ), done.stdout


def test_an_uncaught_exception_ends_the_job_although_others_wait(mpirun):
    done = mpirun(
        2,
        HEAD
        + """
hvd.init()
if hvd.rank() == 1:
    raise ValueError("out of luck")
reduce("x").wait()
""",
    )
    assert done.returncode != 0
    assert "rank 1 of 2" in done.stderr and "out of luck" in done.stderr


def test_an_operation_that_nobody_else_asks_for_is_named_at_the_end(mpirun):
    done = mpirun(
        2,
        HEAD + "\nhvd.init()\nif hvd.rank() == 0: reduce('only here')\n",
        env={"COMMLIB_EXIT_TIMEOUT": "1"},
    )
    assert done.returncode != 0
    assert "allreduce 'only here'" in done.stderr, done.stderr


def test_shutdown_and_init_again(mpirun):
    done = mpirun(
        2,
        HEAD
        + """
for again in range(3):
    hvd.init(process_sets=[hvd.ProcessSet([1])])
    assert reduce("x").wait()[0][0] == 2
    assert [hvd.global_process_set.process_set_id, hvd.global_process_set.ranks] == [0, [0, 1]]
    hvd.shutdown()
    hvd.shutdown()
    assert hvd.global_process_set.process_set_id is None and not hvd.is_initialized()
    try:
        hvd.rank()
    except ValueError as error:
        assert "not initialised" in str(error)
    else:
        sys.exit("rank() without init")
print("fine")
""",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("fine") == 2


def test_worlds_of_some_ranks(mpirun):
    done = mpirun(
        3,
        HEAD
        + """
from mpi4py import MPI
mine = [2] if MPI.COMM_WORLD.rank == 2 else [1, 0]
hvd.init(mine)
assert hvd.size() == len(mine) and hvd.rank() == mine.index(MPI.COMM_WORLD.rank)
assert reduce("x").wait()[0][0] == len(mine)
hvd.shutdown()
hvd.init(MPI.COMM_WORLD)
assert hvd.size() == 3 and reduce("x").wait()[0][0] == 3
hvd.init(MPI.COMM_WORLD)
print("fine")
""",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("fine") == 3
