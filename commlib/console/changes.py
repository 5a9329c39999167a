"""Changes: show the state of a task of unknown duration, on standard error.

On a terminal a redrawn line with a spinner; elsewhere a line for each change.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer


@contextmanager
def show_changes(title: str) -> Iterator[Callable[[str, str], None]]:
    """Yield a function to call with (state, details). Details change all the time and appear on terminals only."""
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
