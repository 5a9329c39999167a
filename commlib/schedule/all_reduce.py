"""All-reduce: every rank ends with the sum over all ranks of the data, bitwise the same everywhere."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from commlib.schedule import all_gather, reduce_scatter
from commlib.schedule.folding import Folded
from commlib.schedule.ir import Round, Span
from commlib.schedule.registry import algorithm
from commlib.schedule.spans import ceil_log2, chunk, floor_log2, per_rank, shift, whole
from commlib.schedule.trees import binomial, down, in_order, overlay, up


@algorithm(
    "all_reduce",
    "ring",
    regions=per_rank,
    rounds=lambda size, segments: 2 * (size - 1),
    sent=lambda size, segments: Fraction(2 * (size - 1), size),
)
def ring(rank: int, size: int) -> Iterator[Round]:
    """Reduce-scatter around the ring, then all-gather around the ring.

    Rounds: 2 (P - 1). Bytes sent per rank: 2 (P - 1)/P n, the least possible.
    Source: Patarasuk & Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations".
    """
    yield from reduce_scatter.ring(rank, size)
    yield from all_gather.ring(rank, size)


@algorithm(
    "all_reduce",
    "recursive_doubling",
    regions=whole,
    rounds=lambda size, segments: floor_log2(size) + 2 * bool(Folded(size).extra),
    sent=lambda size, segments: floor_log2(size) + bool(Folded(size).extra),
)
def recursive_doubling(rank: int, size: int) -> Iterator[Round]:
    """Exchange and add everything with a partner at distance 1, 2, 4, ...

    Rounds: log2 P; floor(log2 P) + 2 if P is no power of two. Bytes sent per rank: n log2 P; then n more.
    Source: Thakur, Rabenseifner & Gropp 2005, "Optimization of collective communication operations in MPICH".
    """
    folded, data = Folded(size), chunk(0)
    yield from folded.hand_in(rank, data, reduce=True)
    position = folded.position(rank)
    if position is not None:
        for bit in range(floor_log2(size)):
            peer = folded.rank(position ^ 1 << bit)
            yield shift(peer, data, peer, data, reduce=True)
    yield from folded.hand_back(rank, data)


@algorithm(
    "all_reduce",
    "halving_doubling",
    regions=lambda size, segments: (Folded(size).core,),
    rounds=lambda size, segments: 2 * floor_log2(size) + 2 * bool(Folded(size).extra),
    sent=lambda size, segments: Fraction(2 * (Folded(size).core - 1), Folded(size).core) + bool(Folded(size).extra),
)
def halving_doubling(rank: int, size: int) -> Iterator[Round]:
    """Reduce-scatter by recursive halving, then all-gather by recursive doubling.

    Rounds: 2 log2 P; 2 floor(log2 P) + 2 if P is no power of two.
    Bytes sent per rank: 2 (Q - 1)/Q n, with Q the largest power of two up to P; n more if P > Q.
    Source: Rabenseifner 2004, "Optimization of collective reduction operations".
    """
    folded = Folded(size)
    data = Span(0, folded.core)
    yield from folded.hand_in(rank, data, reduce=True)
    yield from folded.halving(rank, int)
    yield from folded.doubling(rank, int)
    yield from folded.hand_back(rank, data)


@algorithm(
    "all_reduce",
    "bruck",
    regions=per_rank,
    rounds=lambda size, segments: 2 * ceil_log2(size),
    sent=lambda size, segments: Fraction(2 * (size - 1), size),
)
def bruck(rank: int, size: int) -> Iterator[Round]:
    """Reduce-scatter and all-gather after Bruck: few rounds and the fewest bytes, for any number of ranks.

    Rounds: 2 ceil(log2 P). Bytes sent per rank: 2 (P - 1)/P n, in up to two pieces a round.
    Source: Träff 2024, "Optimal, non-pipelined reduce-scatter and allreduce algorithms".
    """
    yield from reduce_scatter.bruck(rank, size)
    yield from all_gather.bruck(rank, size)


@algorithm(
    "all_reduce",
    "binomial_tree",
    regions=whole,
    segmented=True,
    rounds=lambda size, segments: 2 * ceil_log2(size) * segments,
    sent=lambda size, segments: ceil_log2(size),
    at_most=True,
)
def binomial_tree(rank: int, size: int, segments: int = 1) -> Iterator[Round]:
    """Reduce to rank 0, then broadcast from there; segments climb while earlier ones come down.

    Rounds: 2 ceil(log2 P) for one segment; for S at most S times that, and about half of it for many.
    Bytes sent per rank: n ceil(log2 P), by rank 0.
    Source: Thakur, Rabenseifner & Gropp 2005, "Optimization of collective communication operations in MPICH".
    """
    tree = binomial(rank, size)
    spans = [chunk(index) for index in range(segments)]
    yield from overlay(up(tree, spans), down(tree, spans))


@algorithm(
    "all_reduce",
    "double_tree",
    regions=lambda size, segments: (2 * segments,),
    segmented=True,
    rounds=lambda size, segments: 4 * ceil_log2(size) + 5 * (segments - 1),
    sent=lambda size, segments: Fraction(min(size, 4), 2) if size > 1 else 0,
    at_most=True,
)
def double_tree(rank: int, size: int, segments: int = 1) -> Iterator[Round]:
    """Reduce and broadcast each half of the data on its own binary tree, both at once, in segments.

    The second tree is the first moved on by one rank: whoever has children in one is a leaf in the other, so the
    work is even.
    Rounds: at most 4 ceil(log2 P) + 5 (S - 1) for S segments, each of n/(2 S) bytes. Bytes sent per rank: at most 2 n.
    Source: Sanders, Speck & Träff 2009, "Two-tree algorithms for full bandwidth broadcast, reduction and scan".
    """
    flows = []
    for half in range(2):
        tree = in_order(rank, size, first=half)
        spans = [chunk(index) for index in range(half * segments, (half + 1) * segments)]
        flows += [up(tree, spans), down(tree, spans)]
    yield from overlay(*flows)


@algorithm(
    "all_reduce",
    "direct",
    regions=per_rank,
    rounds=lambda size, segments: 3 * (size - 1),
    sent=lambda size, segments: Fraction(2 * (size - 1), size),
    at_most=True,
)
def direct(rank: int, size: int) -> Iterator[Round]:
    """Send every chunk straight to its owner, who combines all at once and sends the result straight to all.

    No partial sum ever travels: see the reduce-scatter of this name.
    Rounds: 2 (P - 1) if the messages find each other in order, at most 3 (P - 1); two posts.
    Bytes sent per rank: 2 (P - 1)/P n; n (P - 1)/P of memory for what arrives.
    Source: Thakur, Rabenseifner & Gropp 2005, "Optimization of collective communication operations in MPICH" (pairwise
    exchange, posted at once).
    """
    yield from reduce_scatter.direct(rank, size)
    yield from all_gather.direct(rank, size)
