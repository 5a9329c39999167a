"""`commlib info`: what is here, which MPI and launcher are found, what is wrong with them, and what to type."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Any

import typer

from commlib.config import settings as config
from commlib.config.file import find_settings
from commlib.config.rows import Row, rows, value_text
from commlib.console.own_stdout import own_stdout
from commlib.console.width import reader_width, wrapped
from commlib.diagnosis.checks import problems
from commlib.diagnosis.facts import Job
from commlib.diagnosis.look import SECONDS, is_alone, look_alone, look_together
from commlib.diagnosis.problem import ERROR, Problem
from commlib.diagnosis.text import HEADING, job_text, problems_text
from commlib.errors import UsageError
from commlib.process import exits

THROUGH_A_LAUNCHER = 80  # columns


def info(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    show_all: Annotated[bool, typer.Option("--all", help="Show every setting, with default and meaning.")] = False,
    seconds: Annotated[
        float, typer.Option("--timeout", min=1, help="Seconds that each step of MPI may take.")
    ] = SECONDS,
) -> None:
    """Show what is here: versions, MPI, launcher, cores, memory, links, settings; what is wrong, and what to type.

    Under a launcher (mpirun -n 2 commlib info) rank 0 tells it for all ranks, and the network is measured. The exit
    code is 0 if there are warnings at most, 1 if there is an error, 2 if settings are wrong.
    """
    if is_alone():
        job: Job | None = look_alone(seconds)
    else:
        if as_json:
            own_stdout()  # libraries that MPI brings write there, too
        job = look_together(_so_far, seconds)
    if job is None:
        return
    found = problems(job)
    if as_json:
        typer.echo(json.dumps(_data(job, found), indent=1))
    else:
        width = _width()
        typer.echo(job_text(job, width))
        if show_all:
            typer.echo("\nAll settings:\n")
            typer.echo("\n".join(wrapped(text, width, indent=4) for text in _settings_texts()))
        typer.echo("\n" + problems_text(found, width))
    if job.first.no_mpi and not is_alone():
        exits.give_up("commlib info: without an MPI library this rank cannot join the others")
    if job.first.wrong_settings:
        raise typer.Exit(2)
    if any(problem.level == ERROR for problem in found):
        raise typer.Exit(1)


def _width() -> int | None:
    """Return the columns to fill. What a launcher passes on mostly comes to a terminal, which cannot be asked."""
    return reader_width() or (None if is_alone() else THROUGH_A_LAUNCHER)


def _so_far(job: Job) -> str:
    """Return what is known before MPI is started, for what ends there."""
    width, found = _width(), problems(job)
    return f"{job_text(job, width)}\n\n{problems_text(found, width) if found else HEADING}"


def _data(job: Job, found: list[Problem]) -> dict[str, Any]:
    """Return all facts: those of the first rank, what differs in `ranks`, and all settings by their variables."""
    settings = _settings()
    return {
        **asdict(job.first),
        "settings": {row.variable: getattr(settings.config, row.field) for row in rows()},
        "origins": {row.variable: settings.origins.get(row.field, "default") for row in rows()},
        "gpus": job.gpus,
        "network": None if job.network is None else asdict(job.network),
        "ranks": [asdict(rank) for rank in job.ranks],
        "problems": [asdict(problem) for problem in found],
    }


def _settings() -> config.Settings:
    try:
        return find_settings()
    except UsageError:  # it is one of the problems
        return config.Settings(config.Config(), {})


def _settings_texts() -> list[str]:
    settings = _settings()
    return [
        setting_text(row, value_text(getattr(settings.config, row.field)), settings.origins.get(row.field, ""))
        for row in rows()
    ]


def setting_text(row: Row, value: str, origin: str) -> str:
    """Return two lines of a setting: its value, with the default if that is another one; its meaning."""
    default = "" if value == row.default else f"  (default: {row.default or 'empty'})"
    return f"{row.variable}={value}{default}{f'  {origin}' if origin else ''}\n    {row.meaning}"
