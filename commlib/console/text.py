"""Text: parse and format numbers and tables for the command."""

from __future__ import annotations

from collections.abc import Sequence

import typer

from commlib.console.width import blocks

_PREFIXES = "KMG"


def parse_bytes(text: str) -> int:
    """Return the bytes of "4096", "4K", "64M" or "1G" (powers of 1024). Raises typer.BadParameter."""
    digits, prefix = (text[:-1], text[-1].upper()) if text[-1:].upper() in tuple(_PREFIXES) else (text, "")
    if not (digits.isascii() and digits.isdigit()):
        raise typer.BadParameter(f"{text!r} is not a size; expected a number of bytes, or one followed by K, M or G")
    return int(digits) << 10 * (_PREFIXES.find(prefix) + 1 if prefix else 0)


def bytes_text(nbytes: int) -> str:
    """Return the shortest exact form of a size: "4K", "1536", "1G"."""
    power = 0
    while nbytes and nbytes % 1024 == 0 and power < len(_PREFIXES):
        nbytes, power = nbytes // 1024, power + 1
    return f"{nbytes}{_PREFIXES[power - 1] if power else ''}"


def seconds_text(seconds: float) -> str:
    """Return seconds with three digits and a unit: "12.3 us", "4.56 ms", "7.89 s"."""
    for unit, scale in (("us", 1e6), ("ms", 1e3)):
        if float(f"{seconds * scale:.3g}") < 1000:
            return f"{digits(seconds * scale)} {unit}"
    return f"{digits(seconds)} s"


def spread_text(seconds: Sequence[float]) -> str:
    """Return the shortest and the longest of some times: "12.3..15.6 us", or "980 us..1.20 ms" in two units."""
    low, high = seconds_text(min(seconds)), seconds_text(max(seconds))
    (number, unit), other_unit = low.split(), high.split()[1]
    return f"{number}..{high}" if unit == other_unit else f"{low}..{high}"


def digits(value: float) -> str:
    """Return three digits of a number, without an exponent."""
    value = float(f"{value:.3g}")
    return f"{value:.{2 if abs(value) < 10 else 1 if abs(value) < 100 else 0}f}"


def columns(rows: Sequence[Sequence[str]], *, left: int = 1, width: int | None = None) -> str:
    """Return rows of text in columns: the first `left` of them aligned to the left, the others to the right.

    width: if rows are longer, the columns are split into blocks below each other, each with the first column.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def line(row: Sequence[str], chosen: Sequence[int]) -> str:
        cells = (row[i].ljust(widths[i]) if i < left else row[i].rjust(widths[i]) for i in chosen)
        return "  ".join(cells).rstrip()

    parts = ([0, *block] for block in blocks(widths, 2, width))
    return "\n\n".join("\n".join(line(row, chosen) for row in rows) for chosen in parts)
