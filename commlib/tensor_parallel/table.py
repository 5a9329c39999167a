"""Table: a plan as text, with a row for each candidate layer, and for each number that changes. [pure]"""

from __future__ import annotations

from collections.abc import Mapping

from commlib.sharding.sharding import Sharding, parts_of
from commlib.tensor_parallel.styles import Column, PerRank, Row, Style, Vocabulary, brief
from commlib.tensor_parallel.trace import ModelTrace, TraceStep


def plan_table(plan: Mapping[str, Style], reasons: Mapping[str, str], trace: ModelTrace, size: int) -> str:
    """Return a plan in columns: layer, style, the size of its weight and of rank 0's shard, and the reason."""
    sizes = {step.layer: step for step in trace.steps if step.layer}
    rows = [("layer", "style", "full", f"rank 0 of {size}", "why")]
    for name in [name for name in sizes if name in plan or name in reasons]:
        whole = sizes[name].size
        own = _own_size(sizes[name], plan.get(name), size)
        why = reasons.get(name, "as given")
        style = brief(plan[name]) if name in plan else "unsharded"
        rows.append((name or "(model)", style, _text(whole), _text(own), why))
    for name, given in plan.items():
        if isinstance(given, PerRank):
            number = trace.numbers[name]
            rows.append((name, brief(given), str(number), str(given.own(number, 0, size)), reasons[name]))
    widths = [max(map(len, column)) for column in list(zip(*rows, strict=True))[:-1]]
    lines = [[cell.ljust(width) for cell, width in zip(row, (*widths, 0), strict=True)] for row in rows]
    return "\n".join("  ".join(line).rstrip() for line in lines)


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
