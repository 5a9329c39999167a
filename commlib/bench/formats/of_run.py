"""The results of a sweep in another benchmark's format: a table for each world, verb and algorithm."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from commlib.bench.formats.base import Heading
from commlib.bench.formats.choice import named
from commlib.bench.formats.osu import TITLES
from commlib.bench.page.runs import Entry, Run


def lines(run: Run, name: str) -> Iterator[str]:
    """Yield the lines of all that the format has a place for, and a remark for what it has none. Raises nothing."""
    unable: dict[str, None] = {}
    for (nodes, ranks, verb, algorithm, op), group in groupby(sorted(run.entries, key=_table), _table):
        entries = list(group)
        if (name == "osu" and verb not in TITLES) or (name == "nccl" and verb == "barrier"):
            unable[verb] = None
            continue
        plan = run.environments[-1]["plan"]
        heading = Heading(
            verb=verb,
            sizes=tuple(dict.fromkeys(entry.nbytes for entry in entries)),
            iters=plan.get("iters") or 0,
            warmup_iters=plan.get("warmup_iters") or 0,
            is_checked=plan["check"],
            facts={**run.facts, "hosts": run.facts["hosts"][: nodes * ranks]},
            pids=[0] * min(nodes * ranks, len(run.facts["hosts"])),
        )
        yield f"# {nodes} x {ranks} ranks, algorithm {algorithm}{f', {op}' if op else ''}"
        chosen = named(name, heading)
        yield from chosen.head()
        for _, same in groupby(sorted(entries, key=_size), _size):
            places = list(same)
            rows = [entry.row for entry in (places if name == "nccl" else places[:1])]
            yield from chosen.line(*rows)
        yield from chosen.foot()
    for verb in unable:
        yield f"# the format has no place for {verb}"


def _table(entry: Entry) -> tuple[int, int, str, str, str]:
    case = entry.case
    return case.nodes, case.ranks_per_node, case.verb, case.algorithm, case.op


def _size(entry: Entry) -> tuple[str, int]:
    return entry.case.dtype, entry.nbytes
