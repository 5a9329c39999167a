"""What the command says where it cannot join the other processes: one line, no traceback."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer

from commlib.errors import CommlibError


def one_line(error: BaseException) -> str:
    """Return what an error says, on one line."""
    return " ".join(str(error).split())


@contextmanager
def joining(title: str) -> Iterator[None]:
    """Turn an error of `commlib.init` that this process has for itself into a line and the exit code 1.

    One that others may wait for stays an error: its end must be the job's.
    """
    import commlib
    from commlib.bench.options import Refused

    try:
        yield
    except Refused:
        raise
    except CommlibError as error:
        if commlib.is_initialized() or _has_others():
            raise
        typer.echo(f"{title}: {one_line(error)}", err=True)
        raise typer.Exit(1) from None


def _has_others() -> bool:
    mpi: Any = sys.modules.get("mpi4py.MPI")
    return mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized() and mpi.COMM_WORLD.size > 1
