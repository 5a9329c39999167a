"""The page: one self-contained HTML file with tables, charts, the environment and comparisons."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import commlib
from commlib.bench.load import busy_text
from commlib.bench.page import charts
from commlib.bench.page.compare import FEWEST, compare
from commlib.bench.page.runs import BenchRun, CaseEntry
from commlib.bench.rows import OURS
from commlib.console.text import bytes_text, seconds_text, spread_text

MOST_CHARTS = 24  # of a run; a page with more would be too large to read
_FOLDER = Path(__file__).parent


def render(runs: Sequence[BenchRun]) -> str:
    """Return the HTML of one run, or of several, the later ones compared with the first."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(_FOLDER), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {"size": _size, "seconds": seconds_text, "json": _json}
    return environment.get_template("page.html").render(
        title=f"commlib bench: {', '.join(run.name for run in runs)}",
        made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        version=commlib.__version__,
        runs=[_shown(run) for run in runs],
        comparisons=[compare(runs[0], run) for run in runs[1:]],
        ours=OURS,
        fewest=FEWEST,
    )


def _shown(run: BenchRun) -> dict[str, Any]:
    groups = charts.groups(run)
    return {
        "run": run,
        "facts": run.facts,
        "counts": Counter("wrong" if entry.is_wrong else "ok" for entry in run.entries)
        + Counter(case.status for case in run.unmeasured),
        "busy": list(dict.fromkeys(filter(None, (busy_text(one["facts"]) for one in run.environments)))),
        "uncounted": sum(entry.rounds < FEWEST for entry in run.entries),
        "peers": [_beside(run, peer) for peer in run.peers],
        "charts": [(group.title, charts.svg(group)) for group in groups[:MOST_CHARTS]],
        "more_charts": max(0, len(groups) - MOST_CHARTS),
        "rows": [_row(entry, run.peers) for entry in run.entries],
    }


def _beside(run: BenchRun, peer: str) -> dict[str, Any]:
    """Return the comparison with a peer: mean of the ratios, and the number of cases in which commlib is faster.

    Cases of fewer than FEWEST rounds are left out: one burst may fall into a slow period.
    """
    counted = [entry for entry in run.entries if entry.case.ranks > 1 and entry.rounds >= FEWEST]
    ratios = [ratio for entry in counted if (ratio := entry.ratio(peer)) is not None]
    mean = statistics.geometric_mean(ratios) if ratios else None
    return {"name": peer, "mean": mean, "faster": sum(ratio > 1 for ratio in ratios), "of": len(ratios)}


def _row(entry: CaseEntry, peers: Sequence[str]) -> dict[str, Any]:
    times = entry.seconds[OURS]
    return {
        "entry": entry,
        "case": entry.case,
        "spread": spread_text(times),
        "relative_spread": (max(times) - min(times)) / entry.time(),
        "ratios": [entry.ratio(peer) for peer in peers],
    }


def _size(nbytes: int) -> str:
    return bytes_text(nbytes) if nbytes else ""


def _json(value: Any) -> str:
    return json.dumps(value, indent=1, sort_keys=True)
