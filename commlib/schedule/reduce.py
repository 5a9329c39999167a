"""Reduce: the root ends with the sum of the data over all ranks.

The data of the other ranks serves as working space: it holds partial sums at the end.
"""

from __future__ import annotations

from collections.abc import Iterator

from commlib.schedule.ir import Round
from commlib.schedule.registry import algorithm
from commlib.schedule.spans import ceil_log2, chunk, per_segment
from commlib.schedule.trees import binomial, chain, overlay, reduce_up


@algorithm(
    "reduce",
    "binomial_tree",
    regions=per_segment,
    rooted=True,
    segmented=True,
    rounds=lambda size, segments: ceil_log2(size) * segments,
    sent=lambda size, segments: int(size > 1),
)
def binomial_tree(rank: int, size: int, root: int = 0, segments: int = 1) -> Iterator[Round]:
    """Halve the number of ranks that still hold a partial sum in every round.

    Rounds: ceil(log2 P) for each segment. Bytes sent per rank: n.
    Source: Thakur, Rabenseifner & Gropp 2005, "Optimization of collective communication operations in MPICH".
    """
    yield from overlay(reduce_up(binomial(rank, size, root), [chunk(index) for index in range(segments)]))


@algorithm(
    "reduce",
    "chain",
    regions=per_segment,
    rooted=True,
    segmented=True,
    rounds=lambda size, segments: size + segments - 2 if size > 1 else 0,
    sent=lambda size, segments: int(size > 1),
)
def chain_(rank: int, size: int, root: int = 0, segments: int = 1) -> Iterator[Round]:
    """Sum the segments along a chain of all ranks; each rank forwards one while it receives the next.

    Rounds: P - 2 + S for S segments. Bytes sent per rank: n.
    Source: Sanders, Speck & Träff 2009 (linear pipeline), "Two-tree algorithms for full bandwidth broadcast, ...".
    """
    yield from overlay(reduce_up(chain(rank, size, root), [chunk(index) for index in range(segments)]))
