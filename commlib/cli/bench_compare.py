"""`commlib bench compare`: two files of `commlib bench all`, cell by cell."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def bench_compare(
    before: Annotated[Path, typer.Argument(help="a file of `commlib bench all --json`")],
    after: Annotated[Path, typer.Argument(help="a later one")],
) -> None:
    """Find the cells of a table that regressed by 10 % or more.

        commlib bench compare monday.json tuesday.json

    A cell regressed if commlib's time as a share of MPI's, round by round,
    grew by 10 % or more beyond the noise of both files: a slower machine
    slows MPI, too. The change of the time itself is printed next to it, and
    cells whose time alone grew are listed.

    Noise: the interval of about 95 % for the median of the rounds. Cells in
    which it could hide 10 %, or with fewer than 5 rounds, are listed: repeat
    them with more --seconds and --rounds. The exit code is 1 if a cell
    regressed, or has no right result any more.
    """
    from commlib.bench.all_verbs import cells, comparison
    from commlib.bench.options import BenchOptionsError

    try:
        first, second = cells.read(before), cells.read(after)
        found = comparison.compare(first, second)
    except BenchOptionsError as error:
        raise typer.BadParameter(str(error)) from None
    for line in comparison.report(found, first, second):
        typer.echo(line)
    raise typer.Exit(int(any(one.is_regression for one in found.differences)))
