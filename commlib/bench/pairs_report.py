"""Report of pairs: a matrix, its extremes and the slowest pair; CSV lines; JSON."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from commlib.bench.pairs import Matrix
from commlib.bench.plot import name_of_size

CSV_TITLE = "rank,peer,host,peer_host,size_bytes,time_us,GBps"


def cells(matrix: Matrix, ranks: int) -> list[list[str]]:
    """Return the figures of every rank with every other rank, under a line of titles."""
    titles = ["rank", *map(str, range(ranks))]
    return [titles] + [
        [str(rank), *("-" if peer == rank else f"{matrix.figure((rank, peer)):.2f}" for peer in range(ranks))]
        for rank in range(ranks)
    ]


def headline(matrix: Matrix) -> str:
    """Return a heading for the figures of a matrix."""
    kind = "latency" if matrix.is_latency else "bandwidth"
    size = name_of_size(matrix.nbytes)
    return f"{kind} of messages of {size}{'B' if ' ' in size else ' B'}, {matrix.unit}, half of a round trip"


def summary(matrix: Matrix, hosts: Sequence[str]) -> str:
    """Return minimum, median and maximum, and name the slowest pair."""
    figures = [matrix.figure(pair) for pair in matrix.seconds]
    low, slow = matrix.slowest()
    where = f"on {hosts[low]}" if hosts[low] == hosts[slow] else f"on {hosts[low]} and {hosts[slow]}"
    return (
        f"min {min(figures):.2f}, median {statistics.median(figures):.2f}, max {max(figures):.2f} {matrix.unit}; "
        f"slowest pair: ranks {low} and {slow} {where}, {matrix.figure((low, slow)):.2f} {matrix.unit}"
    )


def csv_lines(matrices: Sequence[Matrix], hosts: Sequence[str]) -> Iterator[str]:
    """Yield a line for each pair and size, below a title."""
    yield CSV_TITLE
    for matrix in matrices:
        for (rank, peer), seconds in matrix.seconds.items():
            speed = matrix.nbytes / seconds / 1e9
            yield f"{rank},{peer},{hosts[rank]},{hosts[peer]},{matrix.nbytes},{seconds * 1e6:.3f},{speed:.4f}"


def write(path: Path, matrices: Sequence[Matrix], facts: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Write everything to a JSON file. Times are in seconds, sizes in bytes."""
    content = {
        "benchmark": "commlib bench pairs",
        "facts": dict(facts),
        "options": dict(options),
        "matrices": [
            {
                "size": matrix.nbytes,
                "pairs": [{"ranks": list(pair), "seconds": seconds} for pair, seconds in matrix.seconds.items()],
                "slowest": list(matrix.slowest()),
            }
            for matrix in matrices
        ],
    }
    path.write_text(json.dumps(content, indent=1) + "\n")
