"""Exit hooks: end the job when one process ends. Otherwise the other ranks would wait forever."""

from __future__ import annotations

import atexit
import io
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

from commlib.errors import CommlibError
from commlib.launch import mpi_start
from commlib.process import forks

# Seconds between a rank's last line and the abort: MPICH's launcher stops reading output once a rank aborts.
LAST_WORDS = 0.1

# Seconds that the other ranks give rank 0 to report the error for all of them and to end the job.
AFTER_YOU = 3.0

_hooked = False


def hook(world: Callable[[], Any], leave: Callable[[], str], become_child: Callable[[], None]) -> None:
    """Install the exit hooks of this process, once.

    world: returns the communicator of all ranks, or None. leave: ends the work in flight without hanging, and returns
    a description of unfinished work or "". become_child: called in forked children, where the hooks do nothing.
    """
    global _hooked
    if _hooked:
        return
    _hooked = True
    forks.watch(become_child)
    atexit.register(_at_exit, world, leave)
    previous = sys.excepthook

    def abort_after(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if forks.is_child():
            previous(kind, error, trace)
            return
        if isinstance(error, CommlibError) and error.at_start and not _must_report():
            return
        previous(kind, error, trace)
        if (MPI := mpi_start.started_mpi()) is not None and MPI.COMM_WORLD.size > 1:
            if isinstance(sys.stderr, io.StringIO) and sys.__stderr__ is not None:
                # torch.distributed's hook calls this one and prints its buffer afterwards, which is too late.
                buffered, sys.stderr = sys.stderr.getvalue(), sys.__stderr__
                sys.stderr.write(buffered)
            _abort(MPI, world() or MPI.COMM_WORLD, f"ended by an uncaught {kind.__name__}: {_first_line(error)}")
        _kill_unstarted()

    sys.excepthook = abort_after


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


def give_up(text: str, code: int = 1) -> NoReturn:
    """End a job that cannot start. If all ranks call this, as is usual, only one of them prints the line."""
    if _must_report():
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
    if (MPI := mpi_start.started_mpi()) is not None and MPI.COMM_WORLD.size > 1:
        time.sleep(LAST_WORDS)
        MPI.COMM_WORLD.Abort(code)
    _kill_unstarted()
    sys.exit(code)


def _kill_unstarted() -> None:
    """End this process by a signal if a launcher started it and it has not started MPI.

    MPICH's launcher ignores the exit code of such a process, so the other ranks would wait for it in MPI_Init.
    """
    if mpi_start.is_launched() and not mpi_start.was_started():
        sys.stdout.flush()
        sys.stderr.flush()
        time.sleep(LAST_WORDS)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)


def _must_report() -> bool:
    """Return whether this process must report why the job cannot start. The first process reports it for all.

    The other processes wait for that. They report it too if the first process should have ended the job, and did not.
    """
    if mpi_start.launched_rank() == 0:
        return True
    time.sleep(AFTER_YOU)
    MPI = mpi_start.started_mpi()
    return MPI is None or MPI.COMM_WORLD.size > 1 or mpi_start.ends_job_on_failure()


def _abort(MPI: Any, comm: Any, reason: str) -> None:
    sys.stdout.flush()
    host = MPI.Get_processor_name()
    sys.stderr.write(f"commlib: rank {comm.rank} of {comm.size} on {host} {reason}; aborting the job\n")
    sys.stderr.flush()
    time.sleep(LAST_WORDS)
    MPI.COMM_WORLD.Abort(1)


def _at_exit(world: Callable[[], Any], leave: Callable[[], str]) -> None:
    # MPI is finalised afterwards; unfinished work would hang in the finalisation.
    MPI = mpi_start.started_mpi()
    if forks.is_child() or MPI is None:
        return
    comm = world() or MPI.COMM_WORLD
    left_over = leave()
    if left_over and comm.size > 1:
        _abort(MPI, comm, f"left the program with {left_over}")
    mpi_start.finalize()
