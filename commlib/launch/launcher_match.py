"""Launcher and library: find out whether they belong together, and say what to type if they do not.

Where they speak different protocols every process is rank 0 of 1, all looks fine, and the exit code is 0. Some
libraries end the process when they are started so; those are told before.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from commlib.errors import TransportError
from commlib.launch.launchers import Launched, find_launcher

_ALONE = "a process that is meant to be alone: commlib.init(MPI.COMM_SELF)"

# How srun is told to start the processes of a library, by what stands in the library's name: the first that fits.
_SRUN = (
    ("Open MPI", "srun --mpi=pmix"),
    ("CRAY MPICH", "srun --mpi=cray_shasta"),
    ("Intel", "I_MPI_PMI_LIBRARY=/path/to/Slurm's/libpmi2.so srun --mpi=pmi2"),
    ("", "srun --mpi=pmi2"),
)


def check_launcher(MPI: Any, environment: Mapping[str, str] = os.environ) -> None:
    """Raise TransportError if a launcher has started several processes, but MPI's world is this one alone.

    The launcher and the library speak different protocols then, and every process looks fine.
    """
    launched = find_launcher(environment)
    if launched is None or launched.processes == 1 or MPI.COMM_WORLD.Get_size() > 1:
        return
    if launched.launcher.is_srun and "SLURM_PTY_PORT" in environment:
        return  # a shell of srun's, in which processes are started alone
    raise TransportError(f"{_what(launched)}{explain(launched, library_name(MPI))} ({_ALONE})")


def check_before_start(library: str, environment: Mapping[str, str] = os.environ) -> None:
    """Raise TransportError if a library cannot know the launcher: some end the process when they are started.

    library: what `library_name` says of the one that is loaded.
    """
    launched = find_launcher(environment)
    if launched is None or launched.processes == 1 or mapped_libraries("libpmix"):
        return
    by_mpirun = launched.launcher.command == "mpirun" and "Open MPI" not in library
    by_pmix = launched.launcher.protocol == "PMIx" and "MPICH" in library and "CRAY" not in library
    if by_mpirun or by_pmix:
        raise TransportError(f"{_what(launched)}{explain(launched, library)} ({_ALONE})")


def explain(launched: Launched, library: str) -> str:
    """Return why a launcher and a library (its name) do not find each other, and what to type."""
    command = f"{_mpiexec()} -n {launched.processes} {shlex.join(sys.orig_argv)}"
    if not launched.launcher.is_srun:
        return (
            f", but MPI sees one: the launcher and the library that Python loads ({library}) do not belong together. "
            f"Type {command}, or make Python load the launcher's library with MPI4PY_LIBMPI=/path/to/libmpi.so"
        )
    wanted = srun_command(library)
    by_srun = "" if wanted == launched.launcher.command else f"{wanted}, or "
    return (
        f", but MPI sees one process: {launched.launcher.command} and this MPI ({library}) do not speak the same "
        f"protocol. Type {by_srun}{command} inside an allocation (salloc, sbatch); 'srun --mpi=list' shows what there "
        "is"
    )


def srun_command(library: str) -> str:
    """Return how srun is told to start the processes of a library, by its name."""
    return next(typed for part, typed in _SRUN if part in library)


def _what(launched: Launched) -> str:
    more = "" if launched.size else " or more"
    if launched.launcher.is_srun:
        return f"Slurm started {launched.processes} tasks{more}"
    return f"{launched.launcher.name} started {launched.processes} processes{more}"


def library_name(MPI: Any) -> str:
    """Return what the library calls itself, in a few words."""
    return " ".join(str(MPI.Get_library_version()).split("\n")[0].split(",")[0].replace(":", " ").split())


def mapped_libraries(name: str) -> list[Path]:
    """Return the files of the libraries in this process whose names begin so."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sorted({Path(line.split(maxsplit=5)[5]) for line in lines if f"/{name}" in line})


def _mpiexec() -> str:
    """Return the launcher beside the MPI library of this process."""
    for library in mapped_libraries("libmpi"):
        for folder in library.parents[:4]:
            for place in (folder / "mpiexec", folder / "bin" / "mpiexec"):
                if place.is_file() and os.access(place, os.X_OK):
                    return str(place)
    return "the mpiexec of that library:"
