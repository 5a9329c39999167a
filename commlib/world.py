"""The world: from MPI's processes to a Communicator, and a clean end whatever happens."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from commlib import config, exits, forks
from commlib.errors import CommlibError, UsageError
from commlib.launch import check_launcher, interrupts_held_back, load_mpi

if TYPE_CHECKING:
    from commlib.communicator import Communicator
    from commlib.cost.chooser import Chooser
    from commlib.runtime.process import Runtime

_world: Communicator | None = None
_before: Runtime | None = None  # the last world's, of what is left to be freed together
_joining = False  # the others may wait for this rank in `init`


def init(comm: Any = None, *, defaults: Mapping[str, str] | None = None) -> Communicator:
    """Join the other processes and return the Communicator of them all. Idempotent.

    Collective. `comm` is an mpi4py communicator to use instead of MPI.COMM_WORLD; it is duplicated. Settings are read
    from the COMMLIB_* environment variables, and from `defaults` where those are not set. Raises, on all ranks alike,
    UsageError for a bad setting on one of them and MismatchError for settings that differ; TransportError if there is
    no usable MPI, or if its launcher is that of another MPI; UsageError in a forked child.
    """
    global _world, _joining
    forks.check("commlib.init")
    if _world is not None:
        if comm is not None:
            raise UsageError("init: commlib is initialised already; use world().split for other groups")
        return _world
    exits.hook(lambda: _world, _leave, _become_child)  # first: an error on one rank must end the others' wait for it
    _joining = True
    try:
        with interrupts_held_back():
            _world = _join(comm, defaults or {})
    except CommlibError as error:  # the others have it too
        error.at_start, _joining = True, False
        raise
    _joining = False
    return _world


def _join(comm: Any, defaults: Mapping[str, str]) -> Communicator:
    bad = ""
    try:
        settings = config.load({**defaults, **os.environ})
    except UsageError as error:
        settings, bad = config.Config(), str(error)  # the others must be told, so MPI is started nevertheless
    _set_up_logging(settings.log_level)
    MPI = load_mpi()
    if comm is None:
        check_launcher(MPI)
    base = (MPI.COMM_WORLD if comm is None else comm).Dup()

    from commlib.runtime.recording import Recording

    recording = Recording()
    try:
        recording.start_as_set(settings, base.Get_rank())
    except UsageError as error:
        bad = bad or str(error)
    try:
        chooser = _agreed_chooser(base, settings, bad)
    except CommlibError:  # on all ranks
        recording.close()
        base.Free()
        raise

    from commlib.buffers import shared_memory as segment
    from commlib.communicator import Communicator
    from commlib.runtime.process import Runtime
    from commlib.transport.mpi import MpiTransport

    node = base.Split_type(MPI.COMM_TYPE_SHARED)
    if node.Get_rank() == 0:
        segment.sweep()
    token = base.bcast(secrets.token_hex(4))
    runtime = Runtime(settings, node.Get_size(), chooser, token=token, recording=recording)
    node.Free()
    if _before is not None:
        runtime.retired.take(_before.retired)
    runtime.retired.free(base.allgather)
    made = Communicator(MpiTransport(base), runtime)
    made.group.prepare()
    return made


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
    if forks.is_child():
        return  # nobody waits for it
    left_over = _close(comm)
    if left_over:
        import logging

        logging.getLogger("commlib").warning("shutdown: rank %d leaves behind %s", comm.rank, left_over)


def _close(comm: Communicator) -> str:
    """End all work on this rank without ever hanging; return what did not end well, and nobody knows of, or ""."""
    global _before
    runtime = _before = comm.runtime
    unfinished = runtime.drain(runtime.config.exit_timeout)
    failure = runtime.end()
    return unfinished or failure


def _leave() -> str:
    """Leave the others at the end of this process; return what they may still wait for."""
    global _world
    comm, _world = _world, None
    if comm is not None:
        return _close(comm)
    return "commlib.init unfinished, in which the others may wait" if _joining else ""


def _become_child() -> None:
    if _world is not None:
        _world.runtime.abandon()


def _agreed_chooser(base: Any, settings: config.Config, bad: str) -> Chooser:
    """Return the chooser of rank 0's tuning, once the settings of all ranks agree. Raises on all ranks if not.

    bad: what is wrong with this rank's own settings, or "".
    """
    from commlib.cost.chooser import Chooser, Tuning

    everyone = base.gather((bad, config.compared(settings)))
    data, error = b"", None
    if base.rank == 0:
        try:
            config.compare(everyone)
            data = Tuning.load(settings).to_bytes()
        except CommlibError as caught:
            error = caught
    data, error = base.bcast((data, error))
    if error is not None:
        raise error
    tuning = Tuning.from_bytes(data)
    return Chooser(tuning.machine, tuning.table)


def _set_up_logging(level: str) -> None:
    import logging

    log = logging.getLogger("commlib")
    if not log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("commlib %(levelname)s: %(message)s"))
        log.addHandler(handler)
        log.propagate = False
    log.setLevel(level.upper())
