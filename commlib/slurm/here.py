"""Here: take what this command itself runs with as a job's virtual environment and MPI, where nothing else is said."""

from __future__ import annotations

import sys
from pathlib import Path

from commlib.errors import TransportError, UsageError
from commlib.launch import mpi_start
from commlib.slurm.job import LAUNCHERS


def venv() -> str | None:
    """Return the folder of the virtual environment of this Python, or None if it is in none that can be activated."""
    found = sys.prefix != sys.base_prefix and (Path(sys.prefix) / "bin/activate").exists()
    return sys.prefix if found else None


def mpi() -> str:
    """Return which of LAUNCHERS fits the MPI library that this Python loads. Raises UsageError if it loads none."""
    try:
        library, _ = mpi_start.find_library()
    except TransportError as error:
        raise UsageError(
            f"mpi is not given, and no MPI library is found here that would tell: {error}. Expected one of "
            f"{', '.join(LAUNCHERS)}"
        ) from None
    return "pmix" if "Open MPI" in library else "pmi2"


def environment(mpi: str, venv: str | None) -> dict[str, str]:
    """Return what mpirun would tell ranks and srun does not: where a wheel of Open MPI has its files.

    mpi: one of LAUNCHERS. venv: the job's; nothing is known of others than that of this Python.
    """
    if mpi != "pmix" or venv != sys.prefix:
        return {}
    try:
        library, files = mpi_start.find_library()
    except TransportError:
        return {}  # another MPI is there when the job runs
    is_wheel = "Open MPI" in library and files.startswith(f"{sys.prefix}/lib/")
    return {"OPAL_PREFIX": sys.prefix} if is_wheel else {}
