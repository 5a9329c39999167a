"""Changes: show on standard error how something stands that takes a time nobody knows.

A line that is redrawn on a terminal, with a sign that turns; elsewhere a line for each change.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer


@contextmanager
def shown(title: str) -> Iterator[Callable[[str, str], None]]:
    """Yield what is called with how it stands, and with what changes all the time and is for terminals only."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.markup import escape

        with Console(stderr=True).status(escape(title)) as status:
            yield lambda text, more: status.update(escape(f"{title}: {text} {more}"))
        return
    said = None

    def tell(text: str, more: str) -> None:
        nonlocal said
        if text != said:
            typer.echo(f"{title}: {text}", err=True)
            said = text

    yield tell
