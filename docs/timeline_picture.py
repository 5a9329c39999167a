"""Draw a part of a merged trace: the picture of docs/pages/timeline.md.

    python docs/timeline_picture.py merged.json.gz docs/pages/pictures/timeline.svg [--from MS] [--to MS]

The picture has a band for each rank: its thread's waits, the running operations, and its buckets or pipeline actions.
Arrows lead from the last rank of a collective to the waiting ranks. Needs matplotlib from the extra 'plot'.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path
from typing import Any

from commlib.trace.parse import parse

COLOURS = {"waits": "#d62728", "runs": "#1f77b4", "buckets": "#9ecae1", "pipeline": "#2ca02c", "codec": "#ff7f0e"}

Bar = tuple[float, float, str]
"""Start (ms), length (ms) and name."""


def bars_of(events: list[dict[str, Any]]) -> dict[int, dict[str, list[Bar]]]:
    """Return the bars of each rank, by row of the picture."""
    bars: dict[int, dict[str, list[Bar]]] = defaultdict(lambda: defaultdict(list))
    begun: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        phase, rank = event["ph"], event.get("pid", 0)
        if phase == "X" and event.get("cat") == "wait":
            bars[rank]["waits"].append((event["ts"] / 1e3, event["dur"] / 1e3, event["name"]))
        elif phase in "Bb" and event.get("cat") != "queue":
            begun[rank, event.get("id", event["tid"])].append(event)
        elif phase in "Ee" and (stack := begun[rank, event.get("id", event["tid"])]):
            first = stack.pop()
            row = {None: "runs", "bucket": "buckets"}.get(first.get("cat"), first.get("cat"))
            if row in COLOURS:
                bar = first["ts"] / 1e3, (event["ts"] - first["ts"]) / 1e3, first["name"]
                bars[rank][row].append(bar)
    return bars


def arrows_of(events: list[dict[str, Any]]) -> list[tuple[float, int, float, int]]:
    """Return the arrows: start time (ms), start rank, end time (ms), end rank."""
    started = {event["id"]: event for event in events if event["ph"] == "s" and event.get("cat") == "waits"}
    ends = [event for event in events if event["ph"] == "f" and event.get("id") in started]
    pairs = [(started[end["id"]], end) for end in ends]
    return [(one["ts"] / 1e3, one["pid"], other["ts"] / 1e3, other["pid"]) for one, other in pairs]


def draw(events: list[dict[str, Any]], path: Path, start: float, end: float) -> None:
    """Draw the events between two times (ms) into `path`; its suffix sets the format."""
    from matplotlib.figure import Figure

    ranks = bars_of(events)
    rows = [(rank, row) for rank in sorted(ranks) for row in COLOURS if ranks[rank].get(row)]
    figure = Figure(figsize=(11, 0.8 + 0.45 * len(rows)), layout="constrained")
    axes = figure.subplots()
    height = {place: -number for number, place in enumerate(rows)}
    for (rank, row), y in height.items():
        shown = [bar for bar in ranks[rank][row] if bar[0] < end and bar[0] + bar[1] > start]
        axes.broken_barh([bar[:2] for bar in shown], (y - 0.38, 0.76), color=COLOURS[row], ec="white", lw=0.4)
        for began, length, name in shown:
            if length > (end - start) / 12 and row != "buckets":  # buckets overlap
                axes.text(max(began, start) + length / 50, y, name, va="center", fontsize=7, clip_on=True)
    for began, last, until, rank in arrows_of(events):
        if start <= began and until <= end and until - began < (end - start) / 2:
            to, of = (until, height[rank, "runs"]), (began, height[last, "runs"])
            axes.annotate("", xy=to, xytext=of, arrowprops={"arrowstyle": "->", "color": "black", "lw": 0.7})
    axes.set_yticks(list(height.values()), [f"rank {rank} {row}" for rank, row in rows], fontsize=8)
    axes.set_xlim(start, end)
    axes.set_xlabel("ms")
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, help="the output of `commlib trace merge`")
    parser.add_argument("picture", type=Path)
    parser.add_argument("--from", dest="start", type=float, default=0.0, help="ms")
    parser.add_argument("--to", dest="end", type=float, help="ms; by default the end")
    options = parser.parse_args()
    events, _, _ = parse(options.trace.read_bytes())
    last = max(event["ts"] for event in events if "ts" in event) / 1e3
    draw(events, options.picture, options.start, last if options.end is None else options.end)


if __name__ == "__main__":
    main()
