"""Reduce: the root ends with the sum of the data over all ranks.

The data of the other ranks is used as working space: it holds partial sums at the end.
"""

from __future__ import annotations

from collections.abc import Iterator

from commlib.schedule.ir import Round
from commlib.schedule.registry import algorithm
from commlib.schedule.spans import ceil_log2, chunk, whole
from commlib.schedule.trees import binomial, chain, overlay, up


@algorithm(
    "reduce",
    "binomial_tree",
    regions=whole,
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
    yield from overlay(up(binomial(rank, size, root), [chunk(index) for index in range(segments)]))


@algorithm(
    "reduce",
    "chain",
    regions=whole,
    rooted=True,
    segmented=True,
    rounds=lambda size, segments: size + segments - 2 if size > 1 else 0,
    sent=lambda size, segments: int(size > 1),
)
def chain_(rank: int, size: int, root: int = 0, segments: int = 1) -> Iterator[Round]:
    """Add the segments up along a chain of all ranks; each sends one on while it receives the next.

    Rounds: P - 2 + S for S segments. Bytes sent per rank: n.
    Source: Sanders, Speck & Träff 2009 (linear pipeline), "Two-tree algorithms for full bandwidth broadcast, ...".
    """
    yield from overlay(up(chain(rank, size, root), [chunk(index) for index in range(segments)]))
