"""Markdown tables of GPU benchmark records: each function takes the starts of one section."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.page_text import bytes_text, spread_text, table, time_text

Record = Mapping[str, Any]

WAYS = {"symmetric": "symmetric memory", "ordinary": "other memory", "between": "by the GPUs", "staged": "by the host"}


def verbs(records: Sequence[Record]) -> str:
    """Collectives: commlib's times, their share of the bound, and the ratio of each peer's time."""
    rows = [row for record in records for row in record["rows"]]
    names = list(dict.fromkeys(row["contender"] for row in rows))
    ours, peers = [name for name in names if name in WAYS], [name for name in names if name not in WAYS]
    calls: dict[tuple[str, str, int], dict[str, list[Record]]] = {}
    for row in rows:
        of = calls.setdefault((row["verb"], row["dtype"], row["size"]), {})
        of.setdefault(row["contender"], []).append(row)
    lines = []
    for (verb, dtype, size), of in sorted(calls.items()):
        cells = [verb, dtype, bytes_text(size)]
        for name in ours:
            shares = [row["of_bound"] for row in of.get(name, []) if row["of_bound"]]
            share = f" ({statistics.median(shares):.0%})" if shares and size >= 1 << 24 else ""
            cells.append(time_text(_seconds(of[name])) + share if name in of else "")
        base = _seconds(of[ours[0]])
        cells += [f"{_seconds(of[peer]) / base:.1f}" if peer in of else "" for peer in peers]
        lines.append(cells)
    columns = ["verb", "dtype", "bytes", *(WAYS[name] for name in ours), *(f"{peer}, times" for peer in peers)]
    return "In brackets: the share of the bound.\n\n" + table(columns, lines)


def kernels(records: Sequence[Record]) -> str:
    """Kernels: the memory rate of each, and its share of a copy's rate."""
    lines = []
    for row in (row for record in records for row in record["kernels"]):
        share = f"{row['rate'] / row['copy']:.0%}"
        time = time_text(statistics.median(row["seconds"]))
        lines.append([row["name"], f"{row['moved'] / 2**20:.0f}", time, f"{row['rate']:.0f}", share, row["clock"]])
    return table(["kernel", "MiB moved", "time", "GB/s", "of a copy", "clock"], lines)


def steps(records: Sequence[Record]) -> str:
    """Training steps: their time, and their exposed communication in per cent of a step without communication."""
    lines = []
    for name in records[0]["seconds"]:
        taken = [1e3 * each for record in records for each in record["seconds"][name]]
        exposed = statistics.median(record["exposed_percent"][name] for record in records)
        lines.append([name, spread_text(taken), f"{exposed:.1f}"])
    return table(["step", "ms", "exposed, %"], lines)


def _seconds(rows: Sequence[Record]) -> float:
    seconds: list[float] = [second for row in rows for second in row["seconds"]]
    return statistics.median(seconds)
