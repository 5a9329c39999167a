"""Named operations from outside: idle jobs, ranks that are missing, and restarts."""

from __future__ import annotations

import re

import pytest

HEAD = """
import sys, time
import numpy as np
import commlib
from commlib import horovod as hvd

def reduce(name, rows=3):
    return hvd.start_allreduce([np.ones(rows)], [np.ones(rows)], name, op=hvd.Sum)
"""


def test_waiting_and_idle_ranks_use_no_core(mpirun):
    """A poll every millisecond, as in Horovod, takes some per cent of a core on each rank, always."""
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
work = reduce("late") if hvd.rank() == 0 else None  # rank 1 requests nothing for a while
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


@pytest.mark.any_mpi
def test_a_missing_rank_is_named_with_its_last_operation(mpirun):
    """The late rank arrives when the other has reported it: the time depends on how busy the machine is."""
    done = mpirun(
        2,
        HEAD
        + """
import logging, pathlib

class Said(logging.Handler):
    def emit(self, record):
        if "waits for 'x'" in record.getMessage():
            pathlib.Path("said").touch()

hvd.init()
logging.getLogger("commlib").addHandler(Said())
reduce("before").wait()
while hvd.rank() == 1 and not pathlib.Path("said").exists():
    time.sleep(0.05)
reduce("x").wait()
""",
        env={"COMMLIB_STALL_WARNING": "0.5"},
    )
    assert done.returncode == 0, done.stderr
    assert re.search(
        r"commlib WARNING: process set 0: .*rank 0 has waited \d+ s; not there yet: rank 1; this rank waits for 'x'; "
        r"the last operation of all ranks was allreduce 'before', \d+ s ago",
        done.stderr,
    ), done.stderr


@pytest.mark.any_mpi
def test_ranks_that_request_different_names_get_an_error(mpirun):
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
            rf"rank {rank}: process set 0: allreduce 'step{rank}': rank {rank}: not submitted by rank {1 - rank}; "
            rf"rank {1 - rank} waits for ('step{1 - rank}'|nothing|'both')",
            done.stdout,
        ), done.stdout


def test_an_uncaught_exception_ends_the_job_while_others_wait(mpirun):
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


@pytest.mark.any_mpi
def test_an_operation_of_one_rank_only_is_named_at_the_end(mpirun):
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


@pytest.mark.any_mpi
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


@pytest.mark.any_mpi
def test_process_sets_of_communicators_from_a_split(mpirun):
    """As in Horovod's documentation: each rank passes its own, which was a mismatch of [0, 2] and [1]."""
    done = mpirun(
        3,
        HEAD
        + """
from mpi4py import MPI
from commlib.errors import MismatchError, UsageError

def total(name, process_set):
    work = hvd.start_allreduce([np.ones(3)], [np.ones(3)], name, op=hvd.Sum, process_set=process_set)
    return work.wait()[0][0]

comm = MPI.COMM_WORLD
half = comm.Split(color=comm.rank % 2, key=-comm.rank)
some = comm.Split(color=0 if comm.rank else MPI.UNDEFINED, key=comm.rank)
mine, low, tail = hvd.ProcessSet(half), hvd.ProcessSet([0, 1]), hvd.ProcessSet(some)
hvd.init(comm, process_sets=[mine, low, tail])
assert mine.ranks == ([1] if comm.rank == 1 else [0, 2]) and mine.included()
assert mine.process_set_id == (2 if comm.rank == 1 else 1) and low.process_set_id == 3
assert mine.mpi_comm is half and low.mpi_comm is None and hvd.global_process_set.mpi_comm is comm
assert tail.process_set_id == (4 if comm.rank else None) and bool(tail.included()) == (comm.rank > 0)
assert total("x", mine) == mine.size()
if low.included():
    assert total("x", low) == 2

# Equal sets again, of either kind, stand for those that there are.
again = hvd.ProcessSet(half)
hvd.init(process_sets=[again, low])
assert again == mine and total("z", again) == mine.size()

# Within one call they are refused, as in Horovod.
for sets, words in (
    ([low, hvd.ProcessSet([1, 0])], "the ranks [0, 1] are given twice"),
    ([low, low], "the ranks [0, 1] are given twice"),
    ([again, hvd.ProcessSet([2, 1, 0])], "the ranks [0, 1, 2] are all ranks: they already are the global process set"),
):
    try:
        hvd.init(process_sets=sets)
    except ValueError as error:
        assert words in str(error), error
    else:
        sys.exit("not refused")
assert commlib.is_initialized() and total("y", None) == 3

# One that is refused, on one rank or on all, leaves nothing behind.
fine, bad = hvd.ProcessSet([1, 2]), hvd.ProcessSet([0, 7] if comm.rank == 1 else [0])
new = hvd.ProcessSet([2])
try:
    hvd.init(process_sets=[new, bad])
except UsageError as error:
    assert "ranks [0, 7]: expected ranks from 0 to 2" in str(error), error
else:
    sys.exit("not refused")
try:
    hvd.init(process_sets=[new, hvd.ProcessSet([comm.rank])])
except MismatchError as error:
    assert "rank 0 passes a process set of the ranks [0], but rank 1 does not" in str(error), error
else:
    sys.exit("not refused")
assert new.process_set_id is None
hvd.init(process_sets=[new])
assert new.process_set_id == 5

# Another object for the same set is removed with it.
other = hvd.ProcessSet([0, 1])
hvd.init(process_sets=[other])
assert other.process_set_id == 3 and (not other.included() or other.communicator("test") is low.communicator("test"))
assert hvd.remove_process_set(other) and low.process_set_id is None and other.process_set_id is None
hvd.shutdown()
assert hvd.global_process_set.mpi_comm is None
hvd.init(process_sets=[mine])
assert mine.process_set_id == (2 if comm.rank == 1 else 1) and hvd.global_process_set.mpi_comm is None
print("fine")
""",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("fine") == 3


@pytest.mark.any_mpi
def test_horovods_environment(mpirun, tmp_path):
    """It was silently ignored. A setting of commlib's own wins; one without meaning is named, once."""
    done = mpirun(
        2,
        HEAD
        + """
import os
hvd.init()
hvd.init()
settings = commlib.world().runtime.config
assert (settings.fusion_mib, settings.stall_warning, settings.known_names) == (32, 7.0, 99), settings
reduce("traced").wait()
rank = hvd.rank()
hvd.shutdown()
if rank == 0:  # who writes it; the others have not waited for that
    assert os.path.getsize(os.environ["HOROVOD_TIMELINE"]) > 100
hvd.init()
print("fine")
""",
        env={
            "HOROVOD_FUSION_THRESHOLD": str(32 << 20),
            "HOROVOD_STALL_CHECK_TIME_SECONDS": "7",
            "HOROVOD_CACHE_CAPACITY": "1000",
            "COMMLIB_KNOWN_NAMES": "99",
            "HOROVOD_TIMELINE": str(tmp_path / "trace.json"),
            "HOROVOD_CYCLE_TIME": "5",
            "HOROVOD_AUTOTUNE": "1",
        },
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("fine") == 2
    warning = "commlib does not support these variables and ignores them: HOROVOD_AUTOTUNE, HOROVOD_CYCLE_TIME"
    assert done.stderr.count(warning) == 1, done.stderr


def test_processes_started_by_horovods_launcher_without_mpi(mpirun):
    done = mpirun(1, HEAD + "\nhvd.init()\n", env={"HOROVOD_SIZE": "2", "HOROVOD_RANK": "1"})
    assert done.returncode != 0
    assert "started 2 processes (HOROVOD_SIZE), but MPI sees one" in done.stderr, done.stderr


def test_elastic_functions_in_sequence(mpirun):
    """A rank that returned to the first one mixed with those in the second: both got the other's sums."""
    done = mpirun(
        2,
        HEAD
        + """
from commlib.horovod import elastic

hvd.init()
calls = []

def training(amount, raises):
    @elastic.run
    def run(state):
        calls.append(1)
        while state.step < 3:
            x = np.full(1, amount)
            hvd.start_allreduce([x], [x], "g", op=hvd.Sum).wait()
            state.total, state.step = state.total + x[0], state.step + 1
            state.commit()
        if raises and hvd.rank() == 1 and len(calls) == 1:
            raise hvd.HorovodInternalError("by hand")
        return state.total
    return run(elastic.ObjectState(step=0, total=0.0))

try:
    print("first", training(1.0, True), flush=True)
    print("second", training(1000.0, False), flush=True)
except commlib.CommlibError as error:
    print("error", type(error).__name__, flush=True)
""",
        env={"COMMLIB_TIMEOUT": "20"},
    )
    lines = sorted(line for line in done.stdout.splitlines() if line)
    assert lines == ["error UsageError", "error UsageError", "first 6.0"], lines
    assert done.returncode == 0, done.stderr  # no rank waits for another
