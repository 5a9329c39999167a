"""Write figures, spreads and tables as Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def inner(values: Sequence[float]) -> list[float]:
    """Return the sorted values without a tenth at each end."""
    cut = round(0.1 * (len(values) - 1))
    return sorted(values)[cut : len(values) - cut]


def spread_text(values: Sequence[float]) -> str:
    """Return "median (least-greatest)"; only the median of one value, and "" for no values."""
    if not values:
        return ""
    middle = f"{statistics.median(values):.2f}"
    return middle if len(values) == 1 else f"{middle} ({min(values):.2f}-{max(values):.2f})"


def range_text(values: Sequence[float], form: str) -> str:
    """Return "least-greatest", or one value if both have the same text."""
    ends = [format(value, form).removesuffix(".") for value in (min(values), max(values))] if values else [""]
    return ends[0] if ends[0] == ends[-1] else f"{ends[0]}-{ends[-1]}"


def time_text(seconds: float) -> str:
    """Return three digits and a unit."""
    for unit, scale in (("us", 1e6), ("ms", 1e3)):
        if seconds * scale < 999.5:
            return f"{seconds * scale:#.3g} {unit}".replace(". ", " ")
    return f"{seconds:#.3g} s".replace(". ", " ")


def bytes_text(nbytes: int) -> str:
    """Return "4", "16 Ki", "64 Mi"."""
    for unit, size in (("Mi", 1 << 20), ("Ki", 1 << 10)):
        if nbytes >= size and nbytes % size == 0:
            return f"{nbytes // size} {unit}"
    return str(nbytes)
