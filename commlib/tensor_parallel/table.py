"""Table: a plan as text, with one row for layers whose names differ by a number, and the reasons below. [pure]"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby

from commlib.sharding.sharding import Sharding, parts_of
from commlib.tensor_parallel.styles import Column, PerRank, Row, Style, Vocabulary, brief
from commlib.tensor_parallel.trace import ModelTrace, TraceStep

WIDTH = 100  # columns of the text
_GAP = "  "
_NUMBER = "\0"  # placeholder of the number of a layer
_NARROWEST = 16  # columns of names and of styles, which are broken if they do not fit
Cells = tuple[str, ...]


def plan_table(plan: Mapping[str, Style], reasons: Mapping[str, str], trace: ModelTrace, size: int) -> str:
    """Return a plan in columns: layer, style, the size of its weight and of rank 0's shard, and the reason's number.

    Layers of a stack share a row: `blocks.[0-11].up`. Each reason is below the table, once. No line is longer than
    WIDTH.
    """
    titles = ("layer", "style", "full", f"rank 0 of {size}", "why")
    rows: list[Cells] = [titles]
    numbers: dict[str, int] = {}
    for *cells, why in _fold(_rows(plan, reasons, trace, size)):
        rows.append((*cells, str(numbers.setdefault(why, len(numbers) + 1))))
    widths = _widths(rows)
    lines = [line for row in rows for line in _lines(row, widths)]
    notes = []
    for why, number in numbers.items():
        head = f"{number}{_GAP}"
        notes += textwrap.wrap(
            why, WIDTH, initial_indent=head, subsequent_indent=" " * len(head), break_on_hyphens=False
        )
    return "\n".join([*lines, "", *notes])


def _rows(
    plan: Mapping[str, Style], reasons: Mapping[str, str], trace: ModelTrace, size: int
) -> Iterator[tuple[str, str, str, str, str]]:
    """Yield the cells and the reason of each candidate layer, and of each number that changes."""
    sizes = {step.layer: step for step in trace.steps if step.layer}
    for name in [name for name in sizes if name in plan or name in reasons]:
        own = _own_size(sizes[name], plan.get(name), size)
        style = brief(plan[name]) if name in plan else "unsharded"
        yield name or "(model)", style, _text(sizes[name].size), _text(own), reasons.get(name, "as given")
    for name, given in plan.items():
        if isinstance(given, PerRank):
            number = trace.numbers[name]
            yield name, brief(given), str(number), str(given.own(number, 0, size)), reasons[name]


def _fold(rows: Iterable[Cells]) -> list[Cells]:
    """Return the rows, with those as one that differ only by the first number in the name."""
    ranks_by_cells: dict[Cells, list[int]] = {}
    single: dict[Cells, Cells] = {}
    for row in rows:
        number = re.search(r"\d+", row[0])
        key: Cells = row
        if number is not None:
            # A number in a name follows a separator; other numbers of a reason are counts.
            same = re.compile(rf"(?<=[._/]){number[0]}(?!\d)")
            key = (same.sub(_NUMBER, row[0]), *row[1:-1], same.sub(_NUMBER, row[-1]))
            ranks_by_cells.setdefault(key, []).append(int(number[0]))
        single.setdefault(key, row)
    folded: list[Cells] = []
    for key, first in single.items():
        numbers = ranks_by_cells.get(key, [])
        several = f"[{_ranges(sorted(numbers))}]"
        folded.append(first if len(numbers) < 2 else tuple(cell.replace(_NUMBER, several) for cell in key))
    return folded


def _ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers as ranges: "0-3,5"."""
    texts = []
    for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        values = [number for _, number in run]
        texts.append(f"{values[0]}-{values[-1]}" if len(values) > 1 else str(values[0]))
    return ",".join(texts)


def _widths(rows: Sequence[Cells]) -> list[int]:
    """Return the widths of columns; names and styles are narrowed so that a line has at most WIDTH columns."""
    name, style, *others = [max(map(len, column)) for column in zip(*rows, strict=True)]
    room = WIDTH - sum(others) - len(_GAP) * len(others) - len(_GAP)
    style = min(style, max(_NARROWEST, room - name))
    return [min(name, max(_NARROWEST, room - style)), style, *others]


def _lines(row: Cells, widths: Sequence[int]) -> Iterator[str]:
    """Yield the lines of a row: a cell that is too long continues in the next line."""
    pieces = [textwrap.wrap(cell, width, break_on_hyphens=False) for cell, width in zip(row, widths, strict=True)]
    for number in range(max(map(len, pieces))):
        cells = (one[number] if number < len(one) else "" for one in pieces)
        yield _GAP.join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()


def _text(size: tuple[int, int]) -> str:
    return f"{size[0]} x {size[1]}" if any(size) else ""


def _own_size(step: TraceStep, style: Style | None, size: int) -> tuple[int, int]:
    """Return the size of rank 0's shard of a weight."""
    first, last = step.size
    match style:
        case Column() if step.kind == "attention":
            return (Sharding((last,), 0).length(0, size),) * 2
        case Column():
            parts = parts_of(step.layer, style.parts, last)
            return first, Sharding((last,), 0, parts, style.units, shared=style.shares).length(0, size)
        case Vocabulary() if step.kind == "table":
            return Sharding((first,), 0).length(0, size), last
        case Vocabulary():
            return first, Sharding((last,), 0).length(0, size)
        case Row():
            return Sharding((first,), 0, (), style.units).length(0, size), last
    return step.size
