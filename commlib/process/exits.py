"""The ends of a process: what makes the end of one the end of the job. Without it the others would wait for ever."""

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

# Seconds between the last line of a rank and the abort: MPICH's launcher does not read on once it is told to abort.
LAST_WORDS = 0.1

# Seconds that the other ranks leave the first one to say for all of them what is wrong; it ends the job then.
AFTER_YOU = 3.0

_hooked = False


def hook(world: Callable[[], Any], leave: Callable[[], str], become_child: Callable[[], None]) -> None:
    """Hook the ends of this process, once.

    world: return the communicator of all ranks, or None. leave: end what is under way, without ever hanging, and
    return what did not end well or "". become_child: called in forked children, in which no hook does anything.
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
        if isinstance(error, CommlibError) and error.at_start and not _is_to_speak():
            return
        previous(kind, error, trace)
        if (MPI := mpi_start.started_mpi()) is not None and MPI.COMM_WORLD.size > 1:
            if isinstance(sys.stderr, io.StringIO) and sys.__stderr__ is not None:
                # torch.distributed's hook, which calls this one, prints what is in its buffer later: too late.
                said, sys.stderr = sys.stderr.getvalue(), sys.__stderr__
                sys.stderr.write(said)
            _abort(MPI, world() or MPI.COMM_WORLD, f"ended by an uncaught {kind.__name__}: {_first_line(error)}")
        _end_unstarted()

    sys.excepthook = abort_after


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


def give_up(text: str, code: int = 1) -> NoReturn:
    """End the job because it cannot start, with one line of one rank if all ranks call this, as they mostly do."""
    if _is_to_speak():
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
    if (MPI := mpi_start.started_mpi()) is not None and MPI.COMM_WORLD.size > 1:
        time.sleep(LAST_WORDS)
        MPI.COMM_WORLD.Abort(code)
    _end_unstarted()
    sys.exit(code)


def _end_unstarted() -> None:
    """End this process by a signal if it was launched, and has not started MPI.

    MPICH's launcher does not mind the exit code of such a process, and the others would wait for it in MPI_Init.
    """
    if mpi_start.is_launched() and not mpi_start.was_started():
        sys.stdout.flush()
        sys.stderr.flush()
        time.sleep(LAST_WORDS)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)


def _is_to_speak() -> bool:
    """Let the first process of the job say for all why it cannot start; return whether this one is to say it too.

    That is so if the first one's end would have ended the job, and has not.
    """
    if mpi_start.launched_rank() == 0:
        return True
    time.sleep(AFTER_YOU)
    MPI = mpi_start.started_mpi()
    return MPI is None or MPI.COMM_WORLD.size > 1 or mpi_start.ends_with_the_first()


def _abort(MPI: Any, comm: Any, reason: str) -> None:
    sys.stdout.flush()
    host = MPI.Get_processor_name()
    sys.stderr.write(f"commlib: rank {comm.rank} of {comm.size} on {host} {reason}; aborting the job\n")
    sys.stderr.flush()
    time.sleep(LAST_WORDS)
    MPI.COMM_WORLD.Abort(1)


def _at_exit(world: Callable[[], Any], leave: Callable[[], str]) -> None:
    # MPI is finalised after this; there, unfinished work would hang.
    MPI = mpi_start.started_mpi()
    if forks.is_child() or MPI is None:
        return
    comm = world() or MPI.COMM_WORLD
    left_over = leave()
    if left_over and comm.size > 1:
        _abort(MPI, comm, f"left the program with {left_over}")
    mpi_start.finalize()
