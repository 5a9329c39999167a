"""Exit hooks: end the job when one process ends, and show its error. Otherwise the other ranks would wait forever."""

from __future__ import annotations

import atexit
import io
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

from commlib.errors import CommlibError, PeerError, ShutdownError
from commlib.launch import mpi_start
from commlib.process import exit_calls, forks
from commlib.process.error_board import ErrorBoard
from commlib.process.tracebacks import entered_call, format_error, message_of, shows_all

# Seconds between a rank's last line and the abort: MPICH's launcher stops reading output once a rank aborts.
LAST_WORDS = 0.1

# Seconds that the other ranks give rank 0 to report the error for all of them and to end the job.
AFTER_YOU = 3.0

# Seconds: how long an error that follows from another rank's waits for that rank's report; how long ranks that print
# nothing give the reporting rank to end the job; how long that rank waits for others that fail with it.
_CAUSE_FIRST, _SILENT, _TOGETHER = 1.0, 5.0, 0.3

_CONSEQUENCES = (PeerError, ShutdownError)

_hooked = False


def hook(
    world: Callable[[], Any],
    leave: Callable[[], str],
    become_child: Callable[[], None],
    find_board: Callable[[], ErrorBoard | None] = lambda: None,
) -> None:
    """Install the exit hooks of this process, once.

    world: returns the communicator of all ranks, or None. leave: ends the work in flight without hanging, and returns
    a description of unfinished work or "". become_child: called in forked children, where the hooks do nothing.
    find_board: returns where failing ranks agree which of them reports; None: all of them do, as they do if the setting
    `traceback` is "full".
    """
    global _hooked
    if _hooked:
        return
    _hooked = True
    forks.watch(become_child)
    atexit.register(_at_exit, world, leave, find_board)
    exit_calls.watch(world)
    previous = sys.excepthook

    def abort_after(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if forks.is_child():
            previous(kind, error, trace)
            return
        if isinstance(error, CommlibError) and error.at_start and not _must_report():
            return
        MPI = mpi_start.started_mpi()
        if MPI is None or MPI.COMM_WORLD.size == 1:
            previous(kind, error, trace)
            _kill_unstarted()
            return
        is_ours = previous is sys.__excepthook__
        if not is_ours:
            previous(kind, error, trace)
        if isinstance(sys.stderr, io.StringIO) and sys.__stderr__ is not None:
            # torch.distributed's hook calls this one and prints its buffer afterwards, which is too late.
            buffered, sys.stderr = sys.stderr.getvalue(), sys.__stderr__
            sys.stderr.write(buffered)
        comm, call = world() or MPI.COMM_WORLD, entered_call(trace) or getattr(error, "entered", "")
        reason = f"ended by an uncaught {kind.__name__}{f' in {call}' if call else ''}"
        message = message_of(error)
        text = "" if is_ours else f": {message}"
        report = format_error(error.with_traceback(trace), full=shows_all(world())) if is_ours else ""
        board, patience, code = find_board(), 0.0, 1
        if isinstance(error, _CONSEQUENCES):
            patience = _CAUSE_FIRST
            if board is not None and (exits := board.exits())[0]:
                code = exits[0]
                report += f"({exits[1]})\n"
        if shows_all(world()):
            board = None
        _report_and_abort(MPI, comm, reason + text, report, f"{kind.__name__}: {message}", board, patience, code)

    sys.excepthook = abort_after


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


def _report_and_abort(
    MPI: Any,
    comm: Any,
    reason: str,
    report: str,
    message: str,
    board: ErrorBoard | None,
    patience: float = 0.0,
    code: int = 1,
) -> None:
    """Report why this rank ends, unless another rank reports first, and end the job."""
    sys.stdout.flush()
    report = (
        f"commlib: rank {comm.rank} of {comm.size} on {MPI.Get_processor_name()} {reason}; aborting the job\n{report}"
    )
    if board is not None and not board.claim(comm.rank, message, patience) and board.leave(comm.rank, message, report):
        time.sleep(_SILENT)  # in which the reporting rank ends the job
        board = None
    sys.stderr.write(report)
    sys.stderr.flush()
    if board is not None:
        time.sleep(_TOGETHER)
        if others := board.others_text(comm.rank):
            sys.stderr.write(f"({others})\n")
            sys.stderr.flush()
    time.sleep(LAST_WORDS)
    MPI.COMM_WORLD.Abort(code)


def _at_exit(world: Callable[[], Any], leave: Callable[[], str], find_board: Callable[[], ErrorBoard | None]) -> None:
    # MPI is finalised afterwards; unfinished work would hang in the finalisation.
    MPI = mpi_start.started_mpi()
    if forks.is_child() or MPI is None:
        return
    comm = world() or MPI.COMM_WORLD
    board, left, all_report = find_board(), exit_calls.last(world()), shows_all(world())
    if left is not None and board is not None:
        board.keep_exit(comm.rank, left.code, left.text)
    unfinished = leave()
    if unfinished and comm.size > 1:
        reason = f"left the program with {unfinished}" + ("" if left is None else f": it {left.text}")
        code = 1 if left is None else left.code
        _report_and_abort(MPI, comm, reason, "", reason, None if all_report else board, code=code)
    mpi_start.finalize()
    if left is not None and board is not None:
        board.remove_exit(comm.rank)
