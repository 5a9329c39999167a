"""Barrier: no rank leaves before every rank has arrived."""

from __future__ import annotations

from collections.abc import Iterator

from commlib.schedule.ir import EMPTY, Round
from commlib.schedule.registry import algorithm
from commlib.schedule.spans import ceil_log2, shift


@algorithm(
    "barrier",
    "dissemination",
    regions=lambda size, segments: (),
    rounds=lambda size, segments: ceil_log2(size),
    sent=lambda size, segments: 0,
)
def dissemination(rank: int, size: int) -> Iterator[Round]:
    """Signal the rank 1, 2, 4, ... above, which passes on all arrivals known so far.

    Rounds: ceil(log2 P). Bytes sent per rank: none, only empty messages.
    Source: Hensgen, Finkel & Manber 1988, "Two algorithms for barrier synchronization".
    """
    for bit in range(ceil_log2(size)):
        distance = 1 << bit
        yield shift((rank + distance) % size, EMPTY, (rank - distance) % size, EMPTY)
