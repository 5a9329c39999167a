"""`commlib trace`: read what a job wrote about its operations. Needs no MPI."""

from __future__ import annotations

import typer

trace_app = typer.Typer(help="Read what a job wrote about its operations.", no_args_is_help=True)


@trace_app.callback()
def _trace() -> None:
    pass
