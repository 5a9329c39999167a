"""The table of the command's verbs."""

from __future__ import annotations

from typing import Annotated

import typer

from commlib import __version__

app = typer.Typer(
    name="commlib",
    help="Collectives for training on clusters: measure them, look at them, choose among them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # boxes of several ranks would mix
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"commlib {__version__}")
        raise typer.Exit


@app.callback()
def _commlib(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


from commlib.cli import bench, show, tune  # noqa: E402, F401  # each adds its verb to the table
