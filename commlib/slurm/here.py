"""Here: take what this command itself runs with as a job's virtual environment and MPI, where nothing else is said."""

from __future__ import annotations

import sys
from pathlib import Path

from commlib import launch
from commlib.errors import TransportError, UsageError
from commlib.slurm.job import LAUNCHERS


def venv() -> str | None:
    """Return the folder of the virtual environment of this Python, or None if it is in none that can be activated."""
    found = sys.prefix != sys.base_prefix and (Path(sys.prefix) / "bin/activate").exists()
    return sys.prefix if found else None


def mpi() -> str:
    """Return which of LAUNCHERS fits the MPI library that this Python loads. Raises UsageError if it loads none."""
    try:
        library, _ = launch.find_library()
    except TransportError as error:
        raise UsageError(
            f"mpi is not given, and no MPI library is found here that would tell: {error}. Expected one of "
            f"{', '.join(LAUNCHERS)}"
        ) from None
    return "pmix" if "Open MPI" in library else "pmi2"
