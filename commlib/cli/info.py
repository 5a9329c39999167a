"""`commlib info`: this installation, its MPI and launcher, the problems found, and the commands to type."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Any

import typer

from commlib.config import settings as config
from commlib.config.file import find_settings
from commlib.config.rows import SettingRow, rows, value_text
from commlib.console.reserved_stdout import reserve_stdout
from commlib.console.width import reader_width, wrap
from commlib.diagnosis.checks import problems
from commlib.diagnosis.collection import SECONDS, collect_job, collect_process, is_alone
from commlib.diagnosis.facts import JobFacts
from commlib.diagnosis.problem import ERROR, Problem
from commlib.diagnosis.text import HEADING, job_text, problems_text
from commlib.errors import UsageError
from commlib.process import exits

THROUGH_A_LAUNCHER = 80  # columns


def info(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    show_all: Annotated[bool, typer.Option("--all", help="Show every setting, with default and meaning.")] = False,
    seconds: Annotated[
        float, typer.Option("--timeout", min=1, help="Time limit of each step of MPI, in seconds.")
    ] = SECONDS,
) -> None:
    """Show versions, MPI, launcher, cores, memory, links and settings; what is wrong, and what to type.

    Under a launcher (mpirun -n 2 commlib info) rank 0 reports for all ranks, and the network is measured. The exit
    code is 0 with warnings at most, 1 with an error, 2 with invalid settings.
    """
    if is_alone():
        job: JobFacts | None = collect_process(seconds)
    else:
        if as_json:
            reserve_stdout()  # libraries loaded by MPI write to standard output, too
        job = collect_job(_so_far, seconds)
    if job is None:
        return
    job_problems = problems(job)
    if as_json:
        typer.echo(json.dumps(_data(job, job_problems), indent=1))
    else:
        width = _width()
        typer.echo(job_text(job, width))
        if show_all:
            typer.echo("\nAll settings:\n")
            typer.echo("\n".join(wrap(text, width, indent=4) for text in _settings_texts()))
        typer.echo("\n" + problems_text(job_problems, width))
    if job.first.no_mpi and not is_alone():
        exits.give_up("commlib info: without an MPI library this rank cannot join the others")
    if job.first.wrong_settings:
        raise typer.Exit(2)
    if any(problem.level == ERROR for problem in job_problems):
        raise typer.Exit(1)


def _width() -> int | None:
    """Return the number of columns to fill. A launcher mostly forwards to a terminal, but its width is unknown."""
    return reader_width() or (None if is_alone() else THROUGH_A_LAUNCHER)


def _so_far(job: JobFacts) -> str:
    """Return the report so far, printed if the process ends in MPI."""
    width, job_problems = _width(), problems(job)
    return f"{job_text(job, width)}\n\n{problems_text(job_problems, width) if job_problems else HEADING}"


def _data(job: JobFacts, job_problems: list[Problem]) -> dict[str, Any]:
    """Return all facts: those of the first rank, all ranks under `ranks`, and all settings by variable."""
    settings = _settings()
    return {
        **asdict(job.first),
        "settings": {row.variable: getattr(settings.config, row.field) for row in rows()},
        "origins": {row.variable: settings.origins.get(row.field, "default") for row in rows()},
        "gpus": job.gpus,
        "network": None if job.network is None else asdict(job.network),
        "ranks": [asdict(rank) for rank in job.ranks],
        "problems": [asdict(problem) for problem in job_problems],
    }


def _settings() -> config.Settings:
    try:
        return find_settings()
    except UsageError:  # reported as a problem
        return config.Settings(config.Config(), {})


def _settings_texts() -> list[str]:
    settings = _settings()
    return [
        setting_text(row, value_text(getattr(settings.config, row.field)), settings.origins.get(row.field, ""))
        for row in rows()
    ]


def setting_text(row: SettingRow, value: str, origin: str) -> str:
    """Return two lines for a setting: its value, with the default if that differs; its meaning."""
    default = "" if value == row.default else f"  (default: {row.default or 'empty'})"
    return f"{row.variable}={value}{default}{f'  {origin}' if origin else ''}\n    {row.meaning}"
