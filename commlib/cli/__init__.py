"""The `commlib` command: one verb per file."""

from __future__ import annotations

import os
import sys
from typing import Any

from commlib import is_initialized
from commlib.errors import CommlibError

# Set by Open MPI's launcher and srun --mpi=pmix; by MPICH's and srun --mpi=pmi2.
_LAUNCHED = ("PMIX_RANK", "PMI_RANK")


def main() -> None:
    """Run the command. What it needs beyond the library is the extra 'cli'.

    Wrong usage ends it with exit code 2; under a launcher rank 0 alone says what is wrong.
    """
    try:
        from commlib.cli.app import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        raise SystemExit(
            f"commlib: the command needs {error.name}: install this project with its extra 'cli'"
        ) from None
    try:
        code = app(standalone_mode=False)
    except CommlibError as error:
        if is_initialized() or _has_others():
            raise
        raise SystemExit(f"commlib: {' '.join(str(error).split())}") from None
    except Exception as error:
        if not hasattr(error, "show"):  # click's errors have it, wherever typer keeps click
            raise
        refuse(error)
    sys.exit(code)


def _has_others() -> bool:
    """Return whether other processes wait for this one: its end must be the job's then."""
    mpi: Any = sys.modules.get("mpi4py.MPI")
    return mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized() and mpi.COMM_WORLD.size > 1


def refuse(error: Any) -> None:
    """Say what is wrong with the command line, once, and end with exit code 2. On all ranks together."""
    if not any(name in os.environ for name in _LAUNCHED):
        error.show()
        sys.exit(2)
    from mpi4py import MPI

    if MPI.COMM_WORLD.rank == 0:
        error.show()
        sys.stderr.flush()
    MPI.COMM_WORLD.Barrier()  # a launcher ends the job when the first rank ends badly: rank 0 must have spoken
    sys.exit(2)
