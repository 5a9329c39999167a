"""Launcher match: check that the launcher and the MPI library belong together, and suggest a command if they do not.

With different protocols every process becomes rank 0 of 1, no error appears, and the exit code is 0. Some libraries end
the process at their start instead; `check_before_start` catches those.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from commlib.errors import TransportError
from commlib.launch.launchers import LaunchInfo, find_launcher

_ALONE = "to run this process on its own: commlib.init(MPI.COMM_SELF)"

# The srun command for each library, by a part of the library's name: the first match counts.
_SRUN = (
    ("Open MPI", "srun --mpi=pmix"),
    ("CRAY MPICH", "srun --mpi=cray_shasta"),
    ("Intel", "I_MPI_PMI_LIBRARY=/path/to/Slurm's/libpmi2.so srun --mpi=pmi2"),
    ("", "srun --mpi=pmi2"),
)


def check_launcher(MPI: Any, environment: Mapping[str, str] = os.environ) -> None:
    """Raise TransportError if a launcher started several processes, but MPI's world is only this process.

    The launcher and the library then speak different protocols, without any other error.
    """
    launched = find_launcher(environment)
    if launched is None or launched.processes == 1 or MPI.COMM_WORLD.Get_size() > 1:
        return
    if launched.launcher.is_srun and "SLURM_PTY_PORT" in environment:
        return  # an interactive shell of srun, which starts single processes
    raise TransportError(f"{_describe(launched)}{explain(launched, library_name(MPI))} ({_ALONE})")


def check_before_start(library: str, environment: Mapping[str, str] = os.environ) -> None:
    """Raise TransportError if the library cannot work with the launcher: some end the process at their start.

    library: the `library_name` of the loaded library.
    """
    launched = find_launcher(environment)
    if launched is None or launched.processes == 1 or mapped_libraries("libpmix"):
        return
    by_mpirun = launched.launcher.command == "mpirun" and "Open MPI" not in library
    by_pmix = launched.launcher.protocol == "PMIx" and "MPICH" in library and "CRAY" not in library
    if by_mpirun or by_pmix:
        raise TransportError(f"{_describe(launched)}{explain(launched, library)} ({_ALONE})")


def explain(launched: LaunchInfo, library: str) -> str:
    """Explain why a launcher and a library, given by name, do not work together, and which command to use."""
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
        f"protocol. Type {by_srun}{command} inside an allocation (salloc, sbatch); 'srun --mpi=list' lists the "
        "protocols"
    )


def srun_command(library: str) -> str:
    """Return the srun command that starts processes of a library, by the library's name."""
    return next(typed for part, typed in _SRUN if part in library)


def _describe(launched: LaunchInfo) -> str:
    more = "" if launched.size else " or more"
    if launched.launcher.is_srun:
        return f"Slurm started {launched.processes} tasks{more}"
    return f"{launched.launcher.name} started {launched.processes} processes{more}"


def library_name(MPI: Any) -> str:
    """Return the library's own name and version, shortened."""
    return " ".join(str(MPI.Get_library_version()).split("\n")[0].split(",")[0].replace(":", " ").split())


def mapped_libraries(name: str) -> list[Path]:
    """Return the files of this process's loaded libraries whose names begin with `name`."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sorted({Path(line.split(maxsplit=5)[5]) for line in lines if f"/{name}" in line})


def _mpiexec() -> str:
    """Return the mpiexec that is installed with this process's MPI library."""
    for library in mapped_libraries("libmpi"):
        for folder in library.parents[:4]:
            for place in (folder / "mpiexec", folder / "bin" / "mpiexec"):
                if place.is_file() and os.access(place, os.X_OK):
                    return str(place)
    return "the mpiexec of that library:"
