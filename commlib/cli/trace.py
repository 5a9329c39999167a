"""`commlib trace`: read the timelines and hang dumps of a job. Needs no MPI."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from commlib.cli.hang import hang
from commlib.cli.trace_text import summary_text
from commlib.console.width import reader_width
from commlib.errors import UsageError
from commlib.launch import mpi_start
from commlib.trace.align import Alignment, align
from commlib.trace.files import COMMLIB, Trace, read_all
from commlib.trace.matched_collectives import match_calls
from commlib.trace.merge import merge_events, write
from commlib.trace.operations import RankActivity, read_activity
from commlib.trace.summary import summarise

Files = Annotated[
    list[str],
    typer.Argument(
        metavar="FILE...", help="The timelines of the ranks, and profiles of PyTorch or TensorFlow; 3=FILE is rank 3's."
    ),
]

trace_app = typer.Typer(help="Read the timelines and hang dumps of a job.", no_args_is_help=True)


@trace_app.callback()
def _trace() -> None:
    pass


trace_app.command()(hang)


@trace_app.command(no_args_is_help=True)
def merge(
    files: Files,
    out: Annotated[Path, typer.Option("--out", "-o", help="Output file; compressed if it ends in .gz.")],
    arrows: Annotated[
        bool, typer.Option(help="Draw arrows from the last rank of a collective to waiting ranks.")
    ] = True,
) -> None:
    """Merge the timelines of all ranks into one file for ui.perfetto.dev and chrome://tracing, on one clock."""
    try:
        traces, stories, alignment, notes = _read(files)
        if out.resolve() in {Path(trace.path).resolve() for trace in traces}:
            raise UsageError(f"trace merge: {out} is one of the input files: write to another one")
        events = merge_events(traces, stories, alignment, match_calls(stories) if arrows else ())
        write(events, str(out))
    except UsageError as error:
        raise typer.BadParameter(str(error)) from None
    for note in notes:
        typer.echo(f"note: {note}", err=True)
    clocks = ", ".join(dict.fromkeys(clock.how for clock in alignment.clocks.values()))
    typer.echo(f"{out}: {len(events)} events of {len(stories)} ranks ({clocks}); open it in ui.perfetto.dev")


@trace_app.command(no_args_is_help=True)
def summary(
    files: Files,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """Show which rank waited for which, the share of hidden communication, the critical path of a step, and advice."""
    try:
        _, stories, _, notes = _read(files)
    except UsageError as error:
        raise typer.BadParameter(str(error)) from None
    result = summarise(stories, notes)
    typer.echo(json.dumps(result.as_dict(), indent=1) if as_json else summary_text(result, reader_width()))


def _read(files: Sequence[str]) -> tuple[list[Trace], list[RankActivity], Alignment, list[str]]:
    """Return the traces, operations on the common clock, that clock, and notes. Ends all ranks of a job except 0."""
    if mpi_start.launched_rank():
        raise typer.Exit
    traces, notes = read_all(files)
    own = [read_activity(trace) for trace in traces if trace.kind == COMMLIB]
    alignment = align(traces, own)
    moved = [one.moved(alignment.clocks[one.rank].move) for one in own]
    return traces, moved, alignment, [*notes, *alignment.notes]
