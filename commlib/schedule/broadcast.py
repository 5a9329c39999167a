"""Broadcast: every rank ends with the root's data."""

from __future__ import annotations

from collections.abc import Iterator

from commlib.schedule.ir import Round
from commlib.schedule.registry import algorithm
from commlib.schedule.spans import ceil_log2, chunk, per_segment
from commlib.schedule.trees import binomial, chain, overlay, send_down


@algorithm(
    "broadcast",
    "binomial_tree",
    regions=per_segment,
    rooted=True,
    segmented=True,
    rounds=lambda size, segments: ceil_log2(size) * segments,
    sent=lambda size, segments: ceil_log2(size),
)
def binomial_tree(rank: int, size: int, root: int = 0, segments: int = 1) -> Iterator[Round]:
    """Double the number of ranks that have the data in every round.

    Rounds: ceil(log2 P) for each segment. Bytes sent per rank: n ceil(log2 P), by the root.
    Source: Thakur, Rabenseifner & Gropp 2005, "Optimization of collective communication operations in MPICH".
    """
    yield from overlay(send_down(binomial(rank, size, root), [chunk(index) for index in range(segments)]))


@algorithm(
    "broadcast",
    "chain",
    regions=per_segment,
    rooted=True,
    segmented=True,
    rounds=lambda size, segments: size + segments - 2 if size > 1 else 0,
    sent=lambda size, segments: int(size > 1),
)
def chain_(rank: int, size: int, root: int = 0, segments: int = 1) -> Iterator[Round]:
    """Pass the segments along a chain of all ranks; each forwards one while it receives the next.

    Rounds: P - 2 + S for S segments. Bytes sent per rank: n.
    Source: Sanders, Speck & Träff 2009 (linear pipeline), "Two-tree algorithms for full bandwidth broadcast, ...".
    """
    yield from overlay(send_down(chain(rank, size, root), [chunk(index) for index in range(segments)]))
