"""World: the Communicator of all processes, its start and its shutdown."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from commlib import cuda_aware_mpi
from commlib.config.file import check_unchanged, find_settings
from commlib.config.settings import Config, Settings
from commlib.errors import CommlibError, MismatchError, UsageError
from commlib.launch.launcher_match import check_launcher
from commlib.launch.mpi_start import delay_interrupts, load_mpi
from commlib.process import exits, forks
from commlib.process.error_board import ErrorBoard

if TYPE_CHECKING:
    from commlib.communicator import Communicator
    from commlib.runtime.process import Runtime
    from commlib.transport.base import Transport
    from commlib.transport.mpi import MpiTransport

_world: Communicator | None = None
_settings = Settings(Config(), {})  # of `_world`, with their origins
_before: Runtime | None = None  # runtime of the last world, with memory that all ranks have yet to free together
_joining = False  # True while other ranks may wait for this one in `init`


def init(
    comm: Any = None, *, transport: Transport | None = None, defaults: Mapping[str, str] | None = None
) -> Communicator:
    """Join the other processes and return the Communicator of all of them. Idempotent.

    Collective.

    Args:
        comm: An mpi4py communicator to use instead of MPI.COMM_WORLD; it is duplicated.
        transport: This rank's endpoint in a group of processes that connected without MPI
            (`commlib.transport.base.Transport`); commlib then owns it and does not use MPI.
        defaults: Settings by name, for those that neither a COMMLIB_* variable nor the file of settings
            (`commlib.config.file`) gives.

    Raises:
        UsageError: For a bad setting on any rank, on all ranks; in a forked child; for a later call whose `defaults`
            would change a setting.
        MismatchError: For settings that differ, on all ranks.
        TransportError: If there is no usable MPI, or if the launcher belongs to another MPI.

    Examples:
        >>> comm = commlib.init()
        >>> comm.size
        2
    """
    global _world, _joining
    forks.check("commlib.init")
    if comm is not None and transport is not None:
        raise UsageError("init: give comm or transport, not both")
    if _world is not None:
        if comm is not None or transport is not None:
            raise UsageError("init: commlib is initialised already; use world().split for other groups")
        if defaults:
            check_unchanged(_settings, defaults)
        return _world
    exits.hook(
        lambda: _world, _leave, _become_child, _find_board
    )  # first: an error on one rank must end the wait of the others
    _joining = True
    try:
        with delay_interrupts():
            _world = _join(comm, transport, defaults or {})
    except CommlibError as error:  # raised on all ranks
        error.at_start, _joining = True, False
        raise
    _joining = False
    return _world


def _join(comm: Any, transport: Transport | None, defaults: Mapping[str, str]) -> Communicator:
    global _settings
    bad = ""
    try:
        resolved = find_settings(os.environ, defaults)
    except UsageError as error:
        resolved, bad = Settings(Config(), {}), str(error)  # start MPI anyway: to inform the others
    _settings, settings = resolved, resolved.config
    _set_up_logging(settings.log_level)
    if settings.kernels:
        os.environ["COMMLIB_KERNELS"] = settings.kernels  # perhaps from the file, which kernels do not read
    over_mpi = report = None
    if transport is None:
        transport = over_mpi = _over_mpi(comm, settings)
        report = cuda_aware_mpi.report(settings)

    from commlib import bootstrap
    from commlib.launch import mpi_start
    from commlib.runtime.hang_watch import Answers, watch_for_hangs
    from commlib.runtime.recording import Recording

    recording = Recording()
    try:
        recording.start_from_settings(settings, transport.rank)
    except UsageError as error:
        bad = bad or str(error)
    try:
        about = report, recording.own_clock_id(settings), Answers.of(settings)
        agreement = bootstrap.agree(transport, settings, bad, about, resolved.origins)
    except CommlibError:  # on all ranks
        recording.close()
        transport.close(synchronized=False)
        raise
    if over_mpi is not None:
        mpi_start.unlink_memory_files()  # all ranks have called MPI_Init
    if over_mpi is not None and cuda_aware_mpi.agree([report for report, _, _ in agreement.extras], transport):
        over_mpi.take("cuda")
    retired = None if _before is None else _before.retired
    world = bootstrap.join(transport, settings, agreement, recording, retired)
    if clocks := {rank: clock for rank, (_, clock, _) in enumerate(agreement.extras) if clock}:
        recording.compare_clocks(world, clocks)
    watch_for_hangs(world.runtime, world.rank, [report for _, _, report in agreement.extras])
    return world


def _over_mpi(comm: Any, settings: Config) -> MpiTransport:
    """Return an MPI transport. The ranks have not compared their settings yet."""
    MPI = load_mpi()
    if comm is None:
        check_launcher(MPI)

    from commlib.transport.mpi import MpiTransport

    return MpiTransport(
        (MPI.COMM_WORLD if comm is None else comm).Dup(), devices=cuda_aware_mpi.list_device_kinds(settings)
    )


def world() -> Communicator:
    """Return the Communicator that `init` made.

    Raises:
        UsageError: Before `init` and after `shutdown`.

    Examples:
        >>> commlib.world() is commlib.init()
        True
    """
    if _world is None:
        raise UsageError("commlib is not initialised: call commlib.init() first")
    return _world


def is_initialized() -> bool:
    """Return whether `init` has been called, and `shutdown` not since.

    Examples:
        >>> commlib.is_initialized()
        True
    """
    return _world is not None


def shutdown() -> None:
    """Finish work in flight and leave the other processes. Idempotent; `init` may be called again.

    Waits at most COMMLIB_EXIT_TIMEOUT seconds for work in flight.

    Raises:
        ShutdownError: From the `wait` of work that has not ended by then, and from every later call.
        MismatchError: If ranks made different calls that caused no error before, such as a broadcast from two roots.
    """
    global _world
    if _world is None:
        return
    comm, _world = _world, None
    if forks.is_child():
        return  # no rank waits for a child
    unfinished = _close(comm)
    if unfinished:
        import logging

        logging.getLogger("commlib").warning("shutdown: rank %d: %s", comm.rank, unfinished)
    if comm.runtime.difference:
        raise MismatchError(comm.runtime.difference)


def _close(comm: Communicator) -> str:
    """End all work on this rank without hanging; return a description of failed or unfinished work, or ""."""
    global _before
    runtime = _before = comm.runtime
    unfinished = runtime.drain(runtime.config.exit_timeout)
    failure = runtime.end()
    return unfinished or failure


def _leave() -> str:
    """Leave the group at process exit; return a description of work that other ranks may wait for, or ""."""
    global _world
    comm, _world = _world, None
    if comm is not None:
        return _close(comm) or ("calls that differ from other ranks'" if comm.runtime.difference else "")
    return "commlib.init unfinished, in which the others may wait" if _joining else ""


def _find_board() -> ErrorBoard | None:
    """Return the folder in which failing ranks agree which of them reports; None without one."""
    watch = None if _world is None else _world.runtime.hang_watch
    return None if watch is None or watch.errors is None else ErrorBoard(watch.errors, watch.hangs)


def _become_child() -> None:
    if _world is not None:
        _world.runtime.abandon()


def _set_up_logging(level: str) -> None:
    import logging

    log = logging.getLogger("commlib")
    if not log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("commlib %(levelname)s: %(message)s"))
        log.addHandler(handler)
        log.propagate = False
    log.setLevel(level.upper())
