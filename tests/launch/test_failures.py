"""Failing jobs: ranks that raise, die, exit or hang do not leave the others waiting, and the report names them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

SOON = 10.0  # seconds from the event to the end of the job
START = 10.0  # seconds that mpiexec, Python and numba may take before it (twice what they need on two busy cores)

# By commlib, by Open MPI (for a signal, for an exit code), or by MPICH's launcher, which knows ranks by process only.
NAMES_RANK_1 = r"rank 1\b|RANK 1\b|Process name: \[.*,1\]|PID {process} RUNNING AT"


def names_rank_1(out, err):
    events = re.findall(r"event in process (\d+)", err)
    assert events, f"nothing of the event came through the launcher: {out=} {err=}"
    return re.search(NAMES_RANK_1.format(process=events[0]), out + err)


HEAD = """
import os, signal, sys, time
import numpy as np
import commlib
comm = commlib.init()
x = np.ones(5000)
comm.all_reduce(x)
def event():
    sys.stderr.write(f"event in process {os.getpid()}\\nevent at {time.time()}\\n"); sys.stderr.flush()
"""


@pytest.fixture(scope="session")
def hydra():
    """Return whether mpiexec is MPICH's."""
    mpiexec = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    assert mpiexec is not None
    return "HYDRA" in subprocess.run([mpiexec, "--version"], capture_output=True, text=True).stdout


def end(mpirun, n, program, *, env=None, head=HEAD):
    """Run a program; return its exit code and output, having checked that it ended soon after its event."""
    done = mpirun(n, head + program, env=env, timeout=START + SOON + 5)
    end_time = time.time()
    times = [float(text) for text in re.findall(r"event at ([\d.]+)", done.stderr)]
    assert times, done.stderr
    assert end_time - min(times) < SOON, f"ended {end_time - min(times):.1f} s after the event\n{done.stderr}"
    return done.returncode, done.stdout, done.stderr


WAITS = {
    "node all_reduce": "comm.all_reduce(x)",
    "ring": "comm.all_reduce(x, algorithm='ring')",
    "recv": "comm.recv(x, 1)",
    "async": "comm.barrier_async().wait()",
    "group": "group.all_reduce(x)",
}


@pytest.mark.parametrize("wait", ["node all_reduce", "recv", pytest.param("group", marks=pytest.mark.long)])
def test_an_uncaught_exception_ends_the_job(mpirun, wait):
    code, _, err = end(
        mpirun,
        2,
        f"""
group = comm.split(0)
if comm.rank == 1:
    event()
    raise ValueError("out of luck")
{WAITS[wait]}
""",
    )
    assert code != 0
    assert "ValueError: out of luck" in err
    assert re.search(r"commlib: rank 1 of 2 on \S+ ended by an uncaught ValueError; aborting the job", err)


@pytest.mark.parametrize(
    ("env", "seconds"),
    [({}, "1"), ({"OMPI_MCA_opal_abort_delay": "0"}, None), ({"OMPI_MCA_mpi_abort_delay": "2"}, "2")],
)
def test_aborts_do_not_deadlock(mpirun, hydra, env, seconds):
    """Open MPI's launcher could wait for ever: a rank whose connection an abort had cut aborted at the same moment.

    Each rank gives an earlier abort time to end the job, unless the user has set that time.
    """
    if hydra:
        pytest.skip("a setting of Open MPI")
    code, _, err = end(
        mpirun, 2, "event()\nif comm.rank == 1:\n    raise ValueError('out of luck')\ncomm.recv(x, 1)\n", env=env
    )
    assert code != 0
    assert re.findall(r"Delaying for (\d+) seconds? before aborting", err) == ([] if seconds is None else [seconds])


@pytest.mark.any_mpi
def test_final_output_is_flushed_before_another_exit_hook(mpirun):
    """torch.distributed installs such a hook; the job used to end silently."""
    code, _, err = end(
        mpirun,
        2,
        """
import io
before = sys.excepthook
def hook(*args):
    stderr, sys.stderr = sys.stderr, io.StringIO()
    try:
        before(*args)
    finally:
        text, sys.stderr = sys.stderr.getvalue(), stderr
    sys.stderr.write(text)
sys.excepthook = hook
if comm.rank == 1:
    event()
    raise ValueError("out of luck")
comm.all_reduce(x)
""",
    )
    assert code != 0
    assert re.search(r"^ValueError: out of luck", err, re.MULTILINE)
    assert re.search(r"commlib: rank 1 of 2 on \S+ ended by an uncaught ValueError; aborting the job", err)


@pytest.mark.parametrize("wait", ["node all_reduce", "recv"])
def test_sigkill_ends_the_job(mpirun, wait):
    code, out, err = end(
        mpirun,
        2,
        f"""
if comm.rank == 1:
    time.sleep(0.5)
    event()
    os.kill(os.getpid(), signal.SIGKILL)
{WAITS[wait]}
""",
    )
    assert code != 0
    assert names_rank_1(out, err), out + err


@pytest.mark.parametrize("status", [0, pytest.param(7, marks=pytest.mark.long)])
def test_os_exit_ends_the_job(mpirun, status, hydra):
    code, out, err = end(mpirun, 2, f"\nif comm.rank == 1:\n    event()\n    os._exit({status})\ncomm.all_reduce(x)\n")
    if hydra:
        assert code == status
        pytest.xfail("MPICH's launcher kills the others before they can speak, says nothing, and passes 0 on")
    assert code != 0
    assert names_rank_1(out, err), out + err


@pytest.mark.any_mpi
@pytest.mark.parametrize(
    ("status", "code", "text"),
    [
        ("3", 3, r"sys\.exit\(3\)"),
        pytest.param("-1", 255, r"sys\.exit\(-1\)", marks=pytest.mark.long),
        pytest.param("'no data'", 1, r"sys\.exit with a message", marks=pytest.mark.long),
    ],
)
def test_sys_exit_on_one_rank_ends_the_job_with_its_exit_code(mpirun, status, code, text):
    got, _, err = end(mpirun, 2, f"\nif comm.rank == 1:\n    event()\n    sys.exit({status})\ncomm.all_reduce(x)\n")
    assert got == code, err
    assert "PeerError" in err and re.search(r"rank 1 has shut commlib down or left the program", err)
    assert len(re.findall(rf"^\(rank 1 called {text} in \S+, line \d+\)$", err, re.MULTILINE)) == 1, err


def test_sys_exit_that_was_caught_is_not_reported(mpirun):
    code, _, err = end(
        mpirun,
        2,
        """
event()
if comm.rank == 1:
    try:
        sys.exit(3)
    except SystemExit:
        pass
comm.all_reduce(x)
if comm.rank == 0:
    comm.all_reduce(x)
""",
    )
    assert code == 1
    assert "PeerError" in err and "sys.exit" not in err


def test_sys_exit_on_all_ranks_is_no_error_of_commlib(mpirun):
    code, _, err = end(mpirun, 2, "\nevent()\ncomm.all_reduce(x)\nsys.exit(3)\n")
    assert code == 3
    assert "PeerError" not in err and "commlib: " not in err


@pytest.mark.parametrize(
    "wait", [pytest.param(wait, marks=pytest.mark.long) if wait in ("ring", "async") else wait for wait in WAITS]
)
def test_a_rank_that_exits_early_is_named_to_waiting_ranks(mpirun, wait):
    code, out, err = end(
        mpirun,
        2,
        f"""
group = comm.split(0)
if comm.rank == 1:
    event()
else:
    try:
        {WAITS[wait]}
    except commlib.PeerError as error:
        print(f"rank {{comm.rank}} got {{error}}", flush=True)
        raise
""",
    )
    assert code != 0
    lines = re.findall("rank 0 got .*", out)
    assert lines
    for line in lines:
        assert "will never arrive: rank 1 has shut commlib down or left the program" in line
    assert "PeerError" in err


@pytest.mark.any_mpi
def test_a_rank_that_exits_early_across_nodes(mpirun):
    """Without shared memory no rank can check whether another one still exists."""
    code, _, err = end(
        mpirun,
        2,
        "\nif comm.rank == 1:\n    event()\n    sys.exit(0)\ncomm.all_reduce(x)\n",
        env={"COMMLIB_NODE_PATH": "0"},
    )
    assert code != 0
    assert re.search(r"PeerError.*rank 1", err)


def test_an_independent_rank_succeeds_after_another_has_exited(mpirun):
    code, out, err = end(
        mpirun,
        3,
        """
event()
if comm.rank == 0:
    time.sleep(1.5)
    comm.send(x, 1)
elif comm.rank == 1:
    print(comm.recv(np.zeros(5000), 0).sum())
""",
    )
    assert (code, out) == (0, "5000.0\n"), err


@pytest.mark.parametrize("stuck", ["True", "comm.rank == 0"], ids=["all ranks", "one rank"])
def test_exit_with_work_that_cannot_end(mpirun, stuck):
    code, _, err = end(
        mpirun,
        2,
        f"""
event()
if {stuck}:
    work = comm.recv_async(np.zeros(3), 1 - comm.rank, tag=4)
""",
        env={"COMMLIB_EXIT_TIMEOUT": "2"},
    )
    assert code != 0
    assert re.search(r"commlib: rank \d of 2 on \S+ left the program with .*unfinished.*recv from rank \d, tag 4", err)


def test_exit_with_a_collective_launched_by_one_rank_only(mpirun):
    code, _, err = end(mpirun, 2, "\nevent()\nif comm.rank == 0:\n    work = comm.all_reduce_async(x)\n")
    assert code != 0
    assert re.search(r"rank 0 of 2.*unfinished all_reduce|PeerError.*rank 1", err, re.DOTALL)


def test_exit_finishes_work_that_can_end(mpirun):
    """Launched everywhere, waited for nowhere: it is finished at exit, and nothing is printed."""
    code, _, err = end(
        mpirun,
        2,
        """
event()
works = [comm.all_reduce_async(np.ones(200_000)) for _ in range(20)]
works.append(comm.send_async(np.ones(3), (comm.rank + 1) % comm.size))
works.append(comm.recv_async(np.ones(3), (comm.rank - 1) % comm.size))
""",
    )
    assert code == 0, err
    assert "unfinished" not in err and "Error" not in err


def test_shutdown_with_work_in_flight(mpirun):
    code, out, err = end(
        mpirun,
        2,
        """
event()
if comm.rank == 0:
    stuck = comm.all_reduce_async(x)
    queued = comm.all_reduce_async(x)
start = time.monotonic()
commlib.shutdown()
assert time.monotonic() - start < 5
if comm.rank == 0:
    for work in (stuck, queued):
        error = work.exception()
        assert isinstance(error, (commlib.ShutdownError, commlib.PeerError)), repr(error)
print("well", flush=True)
""",
        env={"COMMLIB_EXIT_TIMEOUT": "1"},
    )
    assert (code, out) == (0, "well\nwell\n"), err


def test_shutdown_finishes_what_all_ranks_launched(mpirun):
    code, out, err = end(
        mpirun,
        2,
        """
event()
works = [comm.all_reduce_async(np.full(200_000, step)) for step in range(20)]
commlib.shutdown()
print([int(work.wait()[0]) for work in works] == [2 * step for step in range(20)], flush=True)
""",
    )
    assert (code, out) == (0, "True\nTrue\n"), err


def test_calls_after_shutdown_and_a_new_start(mpirun):
    code, out, err = end(
        mpirun,
        2,
        """
event()
group = comm.split(0)
commlib.shutdown()
commlib.shutdown()
assert not commlib.is_initialized()
try:
    commlib.world()
except commlib.UsageError as error:
    assert "call commlib.init() first" in str(error)
else:
    raise AssertionError("world() after shutdown")
calls = {
    "all_reduce": lambda c: c.all_reduce(x), "in place": lambda c: c.all_reduce(x, out=x),
    "ring": lambda c: c.all_reduce(x, algorithm="ring"), "barrier": lambda c: c.barrier(),
    "async": lambda c: c.all_gather_async(x), "send": lambda c: c.send(x, 0), "recv": lambda c: c.recv(x, 0),
    "split": lambda c: c.split(0), "empty": lambda c: c.empty(3), "object": lambda c: c.all_gather_object(3),
}
for old in (comm, group):
    for name, call in calls.items():
        try:
            call(old)
        except commlib.ShutdownError as error:
            assert "shut down" in str(error)
        else:
            raise AssertionError(name)
for _ in range(3):
    again = commlib.init()
    assert again is not comm and commlib.init() is again and commlib.world() is again
    assert again.all_reduce(np.ones(3)).tolist() == [2, 2, 2]
    commlib.shutdown()
print("well", flush=True)
""",
    )
    assert (code, out) == (0, "well\nwell\n"), err


def test_a_large_message_for_a_short_receive(mpirun):
    """Open MPI 5.0.11 corrupts memory if such a receive is posted: commlib must check the length first."""
    code, out, err = end(
        mpirun,
        2,
        """
event()
for count in (20_000, 600_000):
    if comm.rank == 0:
        comm.send(np.ones(count), 1)
        comm.send(np.ones(3), 1)
    else:
        try:
            comm.recv(np.ones(4), 0)
        except commlib.MismatchError as error:
            print(error, flush=True)
        assert comm.recv(np.zeros(3), 0).sum() == 3
""",
    )
    assert code == 0, err
    assert out.count("expected 32 bytes") == 2


@pytest.mark.parametrize("level", [pytest.param("funneled", marks=pytest.mark.long), "serialized"])
def test_a_low_thread_level_is_an_error(mpirun, level):
    head = f"""
import sys, time
import mpi4py
mpi4py.rc.thread_level = "{level}"
sys.stderr.write(f"event at {{time.time()}}\\n")
import commlib
"""
    code, _, err = end(mpirun, 2, "commlib.init()", head=head)
    assert code != 0
    assert re.search(r"TransportError: this MPI runs at MPI_THREAD_\w+, but .* needs MPI_THREAD_MULTIPLE: leave", err)


SETTINGS = {
    "unknown": (
        {"COMMLIB_TIMEOUTS": "3"},
        r"UsageError: unknown setting COMMLIB_TIMEOUTS \(did you mean COMMLIB_TIMEOUT\?\)",
    ),
    "range": ({"COMMLIB_SLOT_KIB": "0"}, r"UsageError: .*COMMLIB_SLOT_KIB"),
}


@pytest.mark.any_mpi
@pytest.mark.parametrize("case", SETTINGS)
def test_an_invalid_environment_is_an_error(mpirun, case):
    env, message = SETTINGS[case]
    head = "import sys, time\nsys.stderr.write(f'event at {time.time()}\\n')\nimport commlib\n"
    code, out, err = end(mpirun, 1, "commlib.init()\nprint('started')", head=head, env=env)
    assert code != 0 and not out
    assert re.search(message, err), err


def test_an_error_of_init_on_one_rank_ends_the_job(mpirun):
    """MPI has started by then: a rank that simply ended would wait for the others in MPI_Finalize, and they for it."""
    head = """
import os, sys, time
from mpi4py import MPI
sys.stderr.write(f"event at {time.time()}\\n")
if MPI.COMM_WORLD.rank == 1:
    os.environ["COMMLIB_CHECK"] = "maybe"
import commlib
"""
    code, _, err = end(mpirun, 2, "commlib.init()", head=head)
    assert code != 0
    assert "COMMLIB_CHECK='maybe'" in err and "rank 1" in err


def test_one_process_under_slurm_is_fine(mpirun):
    env = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    code, out, err = end(mpirun, 1, "event()\nprint(int(comm.all_reduce(x)[0]))", env=env)
    assert (code, out) == (0, "1\n"), err


@pytest.mark.any_mpi
def test_memory_shared_in_another_order_on_other_ranks_does_not_hang_the_end(mpirun):
    """Open MPI hung in MPI_Finalize: one rank freed its windows in another order than the others."""
    done = mpirun(
        2,
        """
import threading
import commlib

comm = commlib.init()
groups = [comm.split(0) for _ in range(8)]
kept = {}

def share(number):
    for _ in range(4):
        kept[number] = groups[number].empty(1000)

numbers = range(8) if comm.rank else range(7, -1, -1)
threads = [threading.Thread(target=share, args=(number,)) for number in numbers]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("shared", len(kept))
""",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n").count("shared 8") == 2


@pytest.mark.parametrize(
    "end_of_it", ["", pytest.param("commlib.shutdown()", marks=pytest.mark.long)], ids=["exit", "shutdown"]
)
def test_a_job_whose_last_broadcast_had_two_roots_fails(mpirun, end_of_it):
    """Each root sent its own data to the other and received none: both kept their own, and the exit code was 0."""
    code, _, err = end(
        mpirun,
        2,
        f"""
comm.broadcast(np.ones(8), root=comm.rank)
time.sleep(comm.rank)  # the last one to exit notices it in any case
event()
{end_of_it}
""",
        env={"COMMLIB_NODE_PATH": "0", "COMMLIB_CHECK_FIRST": "0"},
    )
    assert code != 0
    assert re.search(r"world: rank 1 and rank 0 made different calls, which caused no error until now", err), err
