"""Charts of a run: time and bus bandwidth against size, drawn once, as inline SVG for the page or as PNG files."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from commlib.bench.page.runs import BenchRun, CaseEntry
from commlib.bench.plot import name_of_size
from commlib.bench.rows import OURS

# Placeholder colours: the page's style replaces them, so that the charts follow light and dark.
_INK, _LINE = "#010203", "#010204"
_SERIES = tuple(f"#0102{number:02x}" for number in range(16, 24))
_PAPER = {_INK: "#1f2328", _LINE: "#d0d7de"}
_PRINTED = ("#0969da", "#cf222e", "#1a7f37", "#9a6700", "#8250df", "#bf3989", "#0a7ea4", "#57606a")
_MARKERS = "osD^vP*X"
_MOST_TICKS = 12  # steps between the ticks of an axis; more would touch
STYLES = {_INK: "var(--ink)", _LINE: "var(--line)", **{c: f"var(--c{n})" for n, c in enumerate(_SERIES)}}


@dataclass(frozen=True, slots=True)
class ChartGroup:
    """The entries of one chart: one verb on one world, of one dtype and operation, in place or not."""

    title: str
    stem: str
    entries: list[CaseEntry]


def groups(run: BenchRun) -> list[ChartGroup]:
    """Return the charts of a run, the largest world first. Cases with only one size (a barrier) have none."""
    by_kind: dict[tuple[Any, ...], list[CaseEntry]] = {}
    for entry in run.entries:
        case = entry.case
        kind = (case.world, case.verb, case.dtype, case.op, case.in_place, case.symmetric)
        by_kind.setdefault(kind, []).append(entry)
    drawn = [entries for entries in by_kind.values() if len({entry.nbytes for entry in entries}) > 1]
    return [_group(entries) for entries in sorted(drawn, key=lambda entries: -entries[0].case.ranks)]


def _group(entries: list[CaseEntry]) -> ChartGroup:
    case = entries[0].case
    how = "in place" if case.in_place else "out of place"
    words = [case.verb, case.dtype, case.op, how, "" if case.symmetric else "ordinary arrays"]
    world = f"{case.nodes} x {case.ranks_per_node} ranks"
    title = f"{world}: {', '.join(filter(None, words))}"
    return ChartGroup(title, re.sub(r"[^a-z0-9_]+", "-", title.lower()), entries)


def svg(group: ChartGroup) -> str:
    """Return a chart as an <svg> with variables of the page's style as colours."""
    from matplotlib import rc_context

    text = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "commlib"}):
        figure = _figure(group)
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return _slim(text.getvalue(), group.stem)


def _slim(picture: str, stem: str) -> str:
    """Return matplotlib's SVG without superfluous parts, and with names that are unique on the page."""
    picture = picture[picture.index("<svg") :]
    for superfluous in (r"<metadata>.*?</metadata>", r"<style.*?</style>", r"font-family: [^;\"]*;? ?", r"<!--.*?-->"):
        picture = re.sub(superfluous, "", picture, flags=re.DOTALL)
    picture = re.sub(r"(\.\d)\d{4,}", r"\1", picture)  # coordinates, not labels: tenths of a point suffice
    used = dict.fromkeys(re.findall(r"#([A-Za-z][\w.-]*)[\")]", picture))
    picture = re.sub(r' id="([^"]*)"', lambda match: match[0] if match[1] in used else "", picture)
    for number, name in enumerate(used):
        short = f"{stem}-{number}"
        picture = picture.replace(f'id="{name}"', f'id="{short}"')
        picture = picture.replace(f'"#{name}"', f'"#{short}"').replace(f"(#{name})", f"(#{short})")
    for colour, style in STYLES.items():
        picture = picture.replace(colour, style)
    return re.sub(r"\s*\n\s*", "\n", picture)


def write_png(group: ChartGroup, path: Path) -> None:
    """Write a chart as a PNG, dark on white."""
    figure = _figure(group, {**_PAPER, **dict(zip(_SERIES, _PRINTED, strict=True))})
    figure.suptitle(group.title, fontsize="small")
    figure.savefig(path, dpi=120)


def _figure(group: ChartGroup, colours: dict[str, str] | None = None) -> Any:
    from matplotlib.figure import Figure

    def colour(name: str) -> str:
        return name if colours is None else colours[name]

    lines = list(_lines(group.entries))
    panels = [(label, value) for label, value in _PANELS if any(_points(line, value) for line in lines)]
    figure = Figure(figsize=(4 * len(panels), 3.1), layout="constrained")
    for axes, (label, value) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for number, line in enumerate(lines):
            if points := _points(line, value):
                where = number % len(_SERIES)
                axes.plot(
                    *zip(*points, strict=True), "-" if line.contender == OURS else "--", color=colour(_SERIES[where]),
                    marker=_MARKERS[where], ms=3.5, lw=1.4, label=line.name,
                )  # fmt: skip
        _dress(axes, label, colour)
    first = figure.axes[0]
    bounds = {entry.nbytes: entry.bound * 1e6 for entry in lines[0].entries if entry.bound is not None}
    if bounds:
        first.plot(
            *zip(*bounds.items(), strict=True), ":", color=colour(_INK), marker=".", lw=1, label="bound (memory)"
        )
    if panels[-1][1] is _ratio:
        _dress_ratios(figure.axes[-1], colour)
    handles, labels = first.get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=min(6, len(labels)), fontsize=7, frameon=False,
        labelcolor=colour(_INK),
    )  # fmt: skip
    return figure


@dataclass(frozen=True, slots=True)
class _ChartLine:
    name: str
    contender: str
    entries: list[CaseEntry]


def _lines(entries: Sequence[CaseEntry]) -> Iterator[_ChartLine]:
    """Yield the lines of a chart: commlib's for each algorithm, and the peers measured with the first algorithm."""
    algorithms = list(dict.fromkeys(entry.case.algorithm for entry in entries))
    for algorithm in algorithms:
        same = sorted((e for e in entries if e.case.algorithm == algorithm), key=lambda e: e.nbytes)
        yield _ChartLine(OURS if algorithm == "auto" else f"{OURS}, {algorithm}", OURS, same)
        if algorithm == algorithms[0]:
            for peer in dict.fromkeys(name for entry in same for name in entry.seconds if name != OURS):
                yield _ChartLine(peer, peer, [entry for entry in same if peer in entry.seconds])


def _points(line: _ChartLine, value: Callable[[CaseEntry, str], float | None]) -> list[tuple[int, float]]:
    points = ((entry.nbytes, value(entry, line.contender)) for entry in line.entries)
    return [(x, y) for x, y in points if y]


def _microseconds(entry: CaseEntry, name: str) -> float:
    return entry.time(name) * 1e6


def _speed(entry: CaseEntry, name: str) -> float:
    return entry.busbw[name]  # 0 on one rank, which has no bus


def _ratio(entry: CaseEntry, name: str) -> float | None:
    return None if name == OURS else entry.ratio(name)


_PANELS: tuple[tuple[str, Callable[[CaseEntry, str], float | None]], ...] = (
    ("time, us", _microseconds),
    ("bus bandwidth, GB/s", _speed),
    ("time of the peer / commlib", _ratio),
)


def _dress(axes: Any, label: str, colour: Callable[[str], str]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(lambda size, _: name_of_size(size))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("size, bytes", color=colour(_INK), fontsize=8)
    axes.set_ylabel(label, color=colour(_INK), fontsize=8)
    axes.tick_params(colors=colour(_INK), labelsize=7, which="both", length=2)
    axes.minorticks_off()
    axes.grid(color=colour(_LINE), lw=0.6, which="major")
    axes.set_facecolor("none")
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(colour(_LINE))


def _dress_ratios(axes: Any, colour: Callable[[str], str]) -> None:
    """Write ratios at powers of two, from 0.5 to 4 at least, with a line at 1."""
    ticks = ratio_ticks(*axes.dataLim.intervaly)
    axes.set_yscale("log", base=2)
    axes.set_ylim(ticks[0] / 1.1, ticks[-1] * 1.1)
    axes.set_yticks(ticks, [f"{tick:g}" if tick >= 0.25 else f"1/{1 / tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.axhline(1, color=colour(_INK), lw=0.8)


def ratio_ticks(low: float, high: float) -> list[float]:
    """Return powers of two that enclose the ratios from low to high: 0.5, 1, 2, 4 and so on; of many, every n-th."""
    first, last = min(-1, math.floor(math.log2(low))), max(2, math.ceil(math.log2(high)))
    step = -(-(last - first) // _MOST_TICKS)
    return [2.0**power for power in range(first // step * step, last + step, step)]
