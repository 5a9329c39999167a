"""Progress: show how far a long run is, on standard error. A bar on a terminal, lines through a launcher.

Launchers pass on whole lines, so a bar that is redrawn in its place would be seen at the end only.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer

Tell = Callable[[float, str], None]
SECONDS = 2.0  # from line to line, at least


@contextmanager
def shown(title: str, seconds: float | None = None, *, silent: bool = False) -> Iterator[Tell]:
    """Yield what is called with the fraction that is done, and with what is being done. seconds: in all, if known."""
    if silent:
        yield lambda done, what: None
    elif sys.stderr.isatty():
        with _bar(title) as tell:
            yield tell
    else:
        with _lines(title, seconds) as tell:
            yield tell


@contextmanager
def _bar(title: str) -> Iterator[Tell]:
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=1.0)
        yield lambda done, what: bar.update(task, completed=done, description=what)


@contextmanager
def _lines(title: str, seconds: float | None) -> Iterator[Tell]:
    began = time.monotonic()
    limit = "" if seconds is None else f" of {seconds:g}"
    said, unsaid = float("-inf"), ""

    def tell(done: float, what: str) -> None:
        nonlocal said, unsaid
        now = time.monotonic()
        unsaid = f"{title}: {done:4.0%}  {now - began:5.1f}{limit} s  {what}"
        if now - said >= SECONDS:
            typer.echo(unsaid, err=True)
            said, unsaid = now, ""

    yield tell
    if unsaid:
        typer.echo(unsaid, err=True)
