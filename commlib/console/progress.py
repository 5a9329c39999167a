"""Progress: show on standard error how far a long run is, or the state of a task of unknown duration.

A bar or a spinner on a terminal, lines through a launcher: launchers forward complete lines, so a redrawn line would
appear only at the end.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer

ProgressReport = Callable[[float, str], None]
SECONDS = 2.0  # minimum between two lines


@contextmanager
def show_progress(title: str, seconds: float | None = None, *, silent: bool = False) -> Iterator[ProgressReport]:
    """Yield a function to call with (fraction done, current task). seconds: the total duration, if known."""
    if silent:
        yield lambda done, what: None
    elif sys.stderr.isatty():
        with _bar(title) as report:
            yield report
    else:
        with _lines(title, seconds) as report:
            yield report


@contextmanager
def _bar(title: str) -> Iterator[ProgressReport]:
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), auto_refresh=False) as bar:  # a thread that draws disturbs measurements
        task = bar.add_task(title, total=1.0)
        yield lambda done, what: bar.update(task, completed=done, description=what, refresh=True)


@contextmanager
def _lines(title: str, seconds: float | None) -> Iterator[ProgressReport]:
    began = time.monotonic()
    limit = "" if seconds is None else f" of {seconds:g}"
    printed_at, pending = float("-inf"), ""

    def report(done: float, what: str) -> None:
        nonlocal printed_at, pending
        now = time.monotonic()
        pending = f"{title}: {done:4.0%}  {now - began:5.1f}{limit} s  {what}"
        if now - printed_at >= SECONDS:
            typer.echo(pending, err=True)
            printed_at, pending = now, ""

    yield report
    if pending:
        typer.echo(pending, err=True)


@contextmanager
def show_changes(title: str) -> Iterator[Callable[[str, str], None]]:
    """Yield a function to call with (state, details) of a task of unknown duration.

    On a terminal a redrawn line with a spinner; elsewhere a line for each change of the state. Details change all the
    time and appear on terminals only.
    """
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.markup import escape

        with Console(stderr=True).status(escape(title)) as status:
            yield lambda text, more: status.update(escape(f"{title}: {text} {more}"))
        return
    shown_text = None

    def report(text: str, more: str) -> None:
        nonlocal shown_text
        if text != shown_text:
            typer.echo(f"{title}: {text}", err=True)
            shown_text = text

    yield report
