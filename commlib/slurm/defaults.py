"""Defaults of a job: the virtual environment and MPI of this command."""

from __future__ import annotations

import sys
from pathlib import Path

from commlib.errors import TransportError, UsageError
from commlib.launch import mpi_start
from commlib.slurm.job import LAUNCHERS


def venv() -> str | None:
    """Return the folder of this Python's virtual environment, or None if there is none that can be activated."""
    found = sys.prefix != sys.base_prefix and (Path(sys.prefix) / "bin/activate").exists()
    return sys.prefix if found else None


def mpi() -> str:
    """Return the one of LAUNCHERS that fits the MPI library of this Python. Raises UsageError if it loads none."""
    try:
        library, _ = mpi_start.find_library()
    except TransportError as error:
        raise UsageError(
            f"mpi is not given, and this Python finds no MPI library to infer it from: {error}. Expected one of "
            f"{', '.join(LAUNCHERS)}"
        ) from None
    return "pmix" if "Open MPI" in library else "pmi2"


def environment(mpi: str, venv: str | None) -> dict[str, str]:
    """Return a variable that mpirun sets for ranks and srun does not: the folder of a wheel of Open MPI.

    mpi: one of LAUNCHERS. venv: the job's; only this Python's environment is supported.
    """
    if mpi != "pmix" or venv != sys.prefix:
        return {}
    try:
        library, files = mpi_start.find_library()
    except TransportError:
        return {}  # the job will find another MPI
    is_wheel = "Open MPI" in library and files.startswith(f"{sys.prefix}/lib/")
    return {"OPAL_PREFIX": sys.prefix} if is_wheel else {}
