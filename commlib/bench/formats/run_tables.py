"""Formats by name, and the results of a sweep in one of them: a table per world, verb and algorithm."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from commlib.bench.formats.base import Format, Heading
from commlib.bench.formats.nccl import NcclFormat
from commlib.bench.formats.osu import TITLES, OsuFormat
from commlib.bench.page.runs import BenchRun, CaseEntry
from commlib.bench.verbs import ONLY_MPI


def lines(run: BenchRun, name: str) -> Iterator[str]:
    """Yield the lines of all cases that the format supports, and remarks for the others. Raises nothing."""
    unable: dict[str, None] = {}
    for (nodes, ranks, verb, algorithm, op), group in groupby(sorted(run.entries, key=_table), _table):
        entries = list(group)
        if (name == "osu" and verb not in TITLES) or (name == "nccl" and verb in (*ONLY_MPI, "barrier")):
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
        chosen = find_format(name, heading)
        yield from chosen.head()
        for _, same in groupby(sorted(entries, key=_size), _size):
            places = list(same)
            rows = [entry.row for entry in (places if name == "nccl" else places[:1])]
            yield from chosen.line(*rows)
        yield from chosen.foot()
    for verb in unable:
        yield f"# the format does not support {verb}"


def _table(entry: CaseEntry) -> tuple[int, int, str, str, str]:
    case = entry.case
    return case.nodes, case.ranks_per_node, case.verb, case.algorithm, case.op


def _size(entry: CaseEntry) -> tuple[str, int]:
    return entry.case.dtype, entry.nbytes


def find_format(name: str, heading: Heading) -> Format:
    """Return the format of one of the names in `options.FORMATS`."""
    return NcclFormat(heading) if name == "nccl" else OsuFormat(heading)
