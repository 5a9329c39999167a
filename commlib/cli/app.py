"""The table of subcommands."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from commlib import __version__
from commlib.cli.bench import bench
from commlib.cli.bench_all import bench_all
from commlib.cli.bench_compare import bench_compare
from commlib.cli.bench_report import bench_report
from commlib.cli.bench_step import bench_step
from commlib.cli.bench_sweep import bench_sweep
from commlib.cli.info import info
from commlib.cli.show import show
from commlib.cli.slurm import slurm
from commlib.cli.trace import trace_app
from commlib.cli.tune import tune
from commlib.cli.warm import warm


class TwoWordCommands(TyperGroup):
    """Treats the first two words as one command, if it exists: `bench sweep`, although `bench VERB` takes any verb."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command and its remaining arguments."""
        both = " ".join(args[:2])
        return super().resolve_command(ctx, [both, *args[2:]] if both in self.commands else args)


app = typer.Typer(
    name="commlib",
    cls=TwoWordCommands,
    help="Collectives for training on clusters: measure them, inspect them, choose among them.",
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


app.command(no_args_is_help=True)(bench)
app.command("bench sweep")(bench_sweep)
app.command("bench report")(bench_report)
app.command("bench all")(bench_all)
app.command("bench compare")(bench_compare)
app.command("bench step")(bench_step)
app.command()(info)
app.command()(show)
app.command()(tune)
app.command()(warm)
app.add_typer(slurm, name="slurm")
app.add_typer(trace_app, name="trace")
