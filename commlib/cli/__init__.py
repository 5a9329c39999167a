"""The `commlib` command: one subcommand per file."""

from __future__ import annotations

import sys
from typing import Any

from commlib import is_initialized
from commlib.arguments import install
from commlib.errors import CommlibError, UsageError
from commlib.launch import mpi_start
from commlib.process import exits


def main() -> None:
    """Run the command. Beyond the library it needs the extra 'cli'.

    Wrong usage ends it with exit code 2; under a launcher only rank 0 prints the error.
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
        if not hasattr(error, "show"):  # click's errors have it, also typer's copy of click
            raise
        refuse(error)
    sys.exit(code)


def refuse(error: Any) -> None:
    """Print an error of the command line once, and end with exit code 2. Collective."""
    if not mpi_start.is_launched():
        error.show()
        sys.exit(2)
    MPI = mpi_start.load_mpi()
    if MPI.COMM_WORLD.rank == 0:
        error.show()
        sys.stderr.flush()
    MPI.COMM_WORLD.Barrier()  # a launcher ends the job when the first rank fails: rank 0 must have printed
    if not is_initialized():
        mpi_start.finalize()  # otherwise MPI is finalized at exit, after the world
    sys.exit(2)
