"""Rows as comma-separated values: one line per contender, with the same columns for every verb."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator

from commlib.bench.rows import OURS, PERCENTILES, BenchRow

_COLUMNS = (
    *("verb", "ranks", "contender", "in_place", "size_bytes", "count", "type", "redop", "root"),
    *(
        "time_us",
        "min_us",
        "max_us",
        *(f"p{share}_us" for share in PERCENTILES),
        "algbw_GBps",
        "busbw_GBps",
        "of_bound",
        "wrong",
    ),
)


def _line(cells: Iterable[object]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(cells)
    return text.getvalue()


TITLE = _line(_COLUMNS)


def lines(rows: Iterable[BenchRow]) -> Iterator[str]:
    """Yield the lines of rows. A missing measurement is an empty cell. Raises nothing."""
    for row in rows:
        for name in row.seconds:
            yield _line(_cells(row, name))


def _cells(row: BenchRow, name: str) -> list[object]:
    single = row.percentiles.get(name, {})
    share = row.of_bound() if name == OURS else None
    in_place = "" if row.in_place is None else int(row.in_place)
    figures = [f"{single[key] * 1e6:.3f}" if (key := f"p{p}") in single else "" for p in PERCENTILES]
    speed = [f"{row.algbw(name):.4f}", f"{row.busbw(name):.4f}"] if row.size else ["", ""]
    return [
        *(row.verb, row.ranks, name, in_place, row.size, row.count, row.dtype, row.op),
        "" if row.root is None else row.root,
        *(f"{seconds * 1e6:.3f}" for seconds in (row.time(name), *row.spread(name))),
        *(*figures, *speed),
        "" if share is None else f"{share:.4f}",
        "" if row.wrong is None else row.wrong[name],
    ]
