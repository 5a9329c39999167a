"""The `commlib` command: one verb per file."""

from __future__ import annotations

import sys
from typing import Any

from commlib import is_initialized
from commlib.errors import CommlibError, UsageError
from commlib.extras import install
from commlib.launch import mpi_start
from commlib.process import exits


def main() -> None:
    """Run the command. What it needs beyond the library is the extra 'cli'.

    Wrong usage ends it with exit code 2; under a launcher rank 0 alone says what is wrong.
    """
    try:
        from commlib.cli.app import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        raise SystemExit(f"commlib: the command needs {error.name}: {install('cli')}") from None
    try:
        code = app(standalone_mode=False)
    except CommlibError as error:
        if not error.at_start:
            raise
        exits.give_up(f"commlib: {error}", 2 if isinstance(error, UsageError) else 1)
    except Exception as error:
        if not hasattr(error, "show"):  # click's errors have it, wherever typer keeps click
            raise
        refuse(error)
    sys.exit(code)


def refuse(error: Any) -> None:
    """Say what is wrong with the command line, once, and end with exit code 2. On all ranks together."""
    if not mpi_start.is_launched():
        error.show()
        sys.exit(2)
    MPI = mpi_start.load_mpi()
    if MPI.COMM_WORLD.rank == 0:
        error.show()
        sys.stderr.flush()
    MPI.COMM_WORLD.Barrier()  # a launcher ends the job when the first rank ends badly: rank 0 must have spoken
    if not is_initialized():
        mpi_start.finalize()  # else that is done at exit, after the world
    sys.exit(2)
