"""Files of sweeps with given figures."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from commlib.bench.sweep.plan import SweepCase, SweepPlan, cases, parse_plan, to_table
from commlib.bench.sweep.results import FORMAT
from commlib.bench.verbs import VERBS
from tests.unit.bench.figures import row

FACTS: dict[str, Any] = {
    "date": "2026-11-26T12:00:00+00:00",
    "ranks": 8,
    "hosts": ["n0", "n0", "n1", "n1"],
    "cores": 4,
    "cpu": "A <fast> CPU",
    "load": 0.1,
    "mpi": "Open MPI v5.0.11",
    "commit": "0123456789",
    "versions": {"commlib": "0.1", "numpy": "2.4"},
    "environment": {"OMPI_MCA_pml": "ob1"},
    "slurm": None,
}


def header(plan: SweepPlan | None = None, **changes: Any) -> dict[str, Any]:
    """Return the first line of a file, with the environment."""
    facts = {**FACTS, **changes}
    return {"kind": "environment", "number": 0, "format": FORMAT, "plan": to_table(plan or SweepPlan()), "facts": facts}


def line(case: SweepCase, seconds: dict[str, list[float]] | None = None, **changes: Any) -> dict[str, Any]:
    """The line of a case, without figures if there are no seconds."""
    record: dict[str, Any] = {"kind": "case", "key": case.key, "name": case.name, "case": asdict(case)}
    record |= {"status": "ok" if seconds else "refused", "reason": "" if seconds else "it is <not> there", "notes": []}
    if seconds:
        measured = row(
            case.verb,
            ranks=case.ranks,
            dtype=case.dtype,
            op=case.op,
            size=case.nbytes,
            count=case.nbytes // 4,
            seconds=seconds,
            wrong=dict.fromkeys(seconds, 0),
            bound_seconds=[case.nbytes / 1e10] if case.nbytes else [],
            in_place=case.in_place if VERBS[case.verb].name != "barrier" else None,
        )
        record["row"] = measured.figures()
    else:
        record["row"] = None
    return {**record, "took": 1.0, "environment": 0, "date": FACTS["date"], **changes}


def write(
    path: Path,
    *,
    slower: float = 1.0,
    plan: dict[str, Any] | None = None,
    facts: dict[str, Any] | None = None,
    rounds: int = 3,
) -> list[SweepCase]:
    """Write a sweep: each case takes 10 us and 0.1 ns a byte, MPI twice as much, and an algorithm "ring" is refused."""
    table = {"verbs": ["all_reduce", "barrier"], "sizes": ["4K", "64K", "1M"], "algorithms": ["auto", "ring"]}
    chosen = parse_plan({**table, "peers": ["mpi"], "nodes": [1, 2], **(plan or {})})
    planned, _ = cases(chosen, (2, 2))
    lines = [header(chosen, **(facts or {}))]
    for case in planned:
        time = (10e-6 + case.nbytes * 1e-10) * slower
        seconds = {"commlib": [time * share for share in (0.99, 1.0, 1.01)[:rounds]], "mpi": [2 * time] * rounds}
        lines.append(line(case, None if case.algorithm == "ring" else seconds))
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    return planned
