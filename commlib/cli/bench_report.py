"""`commlib bench report`: one HTML page with the results of sweeps, or the same in other formats."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from commlib.arguments import install, suggest


def bench_report(
    results: Annotated[list[Path], typer.Argument(help="files of `commlib bench sweep`, or of a verb's --out")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="the page (default: report.html)")] = None,
    png: Annotated[Path | None, typer.Option(help="folder for each chart as a PNG, in addition")] = None,
    format: Annotated[
        str | None, typer.Option("--format", help="nccl or osu: print in the format of nccl-tests or OSU instead")
    ] = None,
) -> None:
    """Make one HTML page of results: tables, charts, the environment.

        commlib bench report results.jsonl -o report.html

    The page needs no network and no other file. Given several files, it
    compares the later ones with the first and marks cases that are faster or
    slower beyond the noise of their rounds.
    """
    from commlib.bench.options import BenchOptionsError
    from commlib.bench.page import runs

    try:
        bench_runs = [runs.read(path) for path in results]
    except BenchOptionsError as error:
        raise typer.BadParameter(str(error)) from None
    try:
        if format is None:
            _write_page(bench_runs, out or Path("report.html"), png)
        else:
            _write_lines(bench_runs, format, out)
    except ModuleNotFoundError as error:
        if error.name not in ("jinja2", "matplotlib"):
            raise
        raise typer.BadParameter(f"the page needs {error.name}: {install('report')}") from None
    except OSError as error:
        raise typer.BadParameter(f"cannot write {error.filename}: {error.strerror}") from None


def _write_page(bench_runs: list[Any], out: Path, png: Path | None) -> None:
    from commlib.bench.page import charts, page

    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(page.render(bench_runs))
    typer.echo(f"wrote {out}, {out.stat().st_size / 1e3:.0f} kB")
    if png is None:
        return
    png.mkdir(parents=True, exist_ok=True)
    for run in bench_runs:
        for group in charts.groups(run):
            path = png / f"{run.name}-{group.stem}.png"
            charts.write_png(group, path)
            typer.echo(f"wrote {path}")


def _write_lines(bench_runs: list[Any], format: str, out: Path | None) -> None:
    from commlib.bench.formats import run_tables
    from commlib.bench.options import FORMATS

    if format not in FORMATS:
        raise typer.BadParameter(
            f"--format {format!r} is unknown; known are {', '.join(FORMATS)}{suggest(format, FORMATS)}"
        )
    text = "\n".join(line for run in bench_runs for line in run_tables.lines(run, format))
    if out is None:
        typer.echo(text)
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text + "\n")
    typer.echo(f"wrote {out}")
