"""The table of the command's verbs."""

from __future__ import annotations

import typer

app = typer.Typer(
    name="commlib",
    help="Collectives for training on clusters: measure them, look at them, choose among them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # boxes of several ranks would mix
)


@app.callback()
def _commlib() -> None:
    """Keep verbs as sub-commands even while there is only one."""


from commlib.cli import bench, show, tune  # noqa: E402, F401  # each adds its verb to the table
