"""Width: fit text to the reader's terminal; text for a file or another program is not wrapped."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Sequence

NARROWEST = 20  # columns; nothing is readable below this


def reader_width() -> int | None:
    """Return the reader's number of columns, from COLUMNS or the terminal; None in a file or a pipe."""
    value = os.environ.get("COLUMNS", "")
    if value.isdigit() and int(value) > 0:
        return max(NARROWEST, int(value))
    if not sys.stdout.isatty():
        return None
    try:
        columns = os.get_terminal_size(sys.stdout.fileno()).columns
    except OSError:
        return None
    return max(NARROWEST, columns) if columns else None  # 0: Open MPI's ranks have a terminal without a size


def wrap(text: str, width: int | None, *, indent: int = 0) -> str:
    """Return the lines of a text, each broken if it is too long; continuation lines are indented."""
    if width is None:
        return text
    space = " " * min(indent, width // 2)
    wrapper = textwrap.TextWrapper(width, subsequent_indent=space, break_on_hyphens=False)
    lines = (wrapper.wrap(line) or [""] for line in text.split("\n"))
    return "\n".join(piece for pieces in lines for piece in pieces)


def blocks(widths: Sequence[int], gap: int, width: int | None) -> list[range]:
    """Return the columns of each block, if every block starts with the first column; at least one other in each."""
    first, *others = widths
    ranges, used = [], 0
    start = 1
    for index, one in enumerate(others, 1):
        if width is not None and index > start and first + used + gap + one > width:
            ranges.append(range(start, index))
            start, used = index, 0
        used += gap + one
    return [*ranges, range(start, len(widths))]


def fold(picture: str, width: int | None) -> str:
    """Return a picture of `commlib.schedule.render`, with its columns in blocks if it is too wide."""
    title, *lines = picture.rstrip("\n").split("\n")
    rows = [line.split("│") for line in lines]
    rows = [[cell.strip(" ") for cell in row] for row in rows]
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    if width is None or sum(widths) + 3 * (len(widths) - 1) <= width:
        return wrap(title, width) + "\n" + "\n".join(lines)
    parts = []
    for block in blocks(widths, 3, width):
        chosen = [0, *block]
        parts.append("\n".join(" │ ".join(row[i].ljust(widths[i]) for i in chosen).rstrip() for row in rows))
    return "\n\n".join([wrap(title, width), *parts])
