"""The picture of a run: bus bandwidth and time against size, commlib and its peers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from commlib.arguments import install
from commlib.bench.rows import OURS, BenchRow

MISSING = f"no picture: matplotlib is not installed ({install('plot')})"
_MARKS = {OURS: ("-", "o"), "mpi": ("--", "s"), "pieces": ("-.", "^"), "gloo": (":", "D")}
_UNITS = ("", "Ki", "Mi", "Gi", "Ti")


def can_plot() -> bool:
    """Return whether matplotlib is installed."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        return False
    return True


def write(path: Path, rows: Sequence[BenchRow], title: str) -> None:
    """Write the PNG: one line style for each contender, one colour for each dtype and operation if there are many."""
    from matplotlib.figure import Figure

    if rows[0].size == 0:
        figure = Figure(figsize=(6, 4), layout="constrained")
        _bars(figure.subplots(), rows[0])
    else:
        figure = Figure(figsize=(12, 4.8), layout="constrained")
        bandwidth, time = figure.subplots(1, 2)
        _lines(bandwidth, rows, "bus bandwidth, GB/s", lambda row, name: row.busbw(name))
        _lines(time, rows, "time of a call, us", lambda row, name: row.time(name) * 1e6)
        time.legend(fontsize="small")
    figure.suptitle(title, fontsize="medium")
    figure.savefig(path, dpi=120)


def _lines(axes: Any, rows: Sequence[BenchRow], label: str, figure_of: Any) -> None:
    several = len({row.in_place for row in rows}) > 1
    kinds = list(dict.fromkeys(_kind(row, several) for row in rows))
    for number, kind in enumerate(kinds):
        same = [row for row in rows if _kind(row, several) == kind]
        for position, (name, (style, marker)) in enumerate(_MARKS.items()):
            points = [(row.size, figure_of(row, name)) for row in same if name in row.seconds]
            points = [(size, figure) for size, figure in points if figure > 0]  # one rank has no bus
            if points:
                what = " ".join(filter(None, [name, *(kind if len(kinds) > 1 else ())]))
                colour = f"C{number if len(kinds) > 1 else position}"
                axes.plot(*zip(*points, strict=True), style, color=colour, marker=marker, ms=4, label=what)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")  # for bandwidths, too: otherwise all small sizes would be on the axis
    axes.xaxis.set_major_formatter(lambda size, _: name_of_size(size))
    axes.set_xlabel("size, bytes")
    axes.set_ylabel(label)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.grid(alpha=0.3, which="both")


def _kind(row: BenchRow, several: bool) -> tuple[str, ...]:
    """Return the key of a line per contender. several: whether rows in place and out of place are both present."""
    return (row.dtype, row.op, *((("in place" if row.in_place else "out of place"),) if several else ()))


def name_of_size(nbytes: float) -> str:
    """Return a size in its shortest form: 65536 is 64 Ki."""
    power = 0
    while nbytes >= 1024 and power < len(_UNITS) - 1:
        nbytes, power = nbytes / 1024, power + 1
    return f"{nbytes:g} {_UNITS[power]}".strip()


def _bars(axes: Any, row: BenchRow) -> None:
    axes.bar(list(row.seconds), [row.time(name) * 1e6 for name in row.seconds])
    axes.set_ylabel("time of a call, us")
