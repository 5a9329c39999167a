"""All-reduce: every rank ends with the sum over all ranks of the data, bitwise the same on all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from commlib.schedule import all_gather, reduce_scatter
from commlib.schedule.folding import FoldedRanks
from commlib.schedule.ir import Round, Span
from commlib.schedule.registry import algorithm
from commlib.schedule.spans import ceil_log2, chunk, floor_log2, per_rank, per_segment, shift
from commlib.schedule.trees import binomial, in_order, overlay, reduce_up, send_down


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
    regions=per_segment,
    rounds=lambda size, segments: floor_log2(size) + 2 * bool(FoldedRanks(size).extra),
    sent=lambda size, segments: floor_log2(size) + bool(FoldedRanks(size).extra),
)
def recursive_doubling(rank: int, size: int) -> Iterator[Round]:
    """Exchange and add everything with a partner at distance 1, 2, 4, ...

    Rounds: log2 P; floor(log2 P) + 2 if P is no power of two. Bytes sent per rank: n log2 P; then n more.
    Source: Thakur, Rabenseifner & Gropp 2005, "Optimization of collective communication operations in MPICH".
    """
    folded, data = FoldedRanks(size), chunk(0)
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
    regions=lambda size, segments: (FoldedRanks(size).core,),
    rounds=lambda size, segments: 2 * floor_log2(size) + 2 * bool(FoldedRanks(size).extra),
    sent=lambda size, segments: (
        Fraction(2 * (FoldedRanks(size).core - 1), FoldedRanks(size).core) + bool(FoldedRanks(size).extra)
    ),
)
def halving_doubling(rank: int, size: int) -> Iterator[Round]:
    """Reduce-scatter by recursive halving, then all-gather by recursive doubling.

    Rounds: 2 log2 P; 2 floor(log2 P) + 2 if P is no power of two.
    Bytes sent per rank: 2 (Q - 1)/Q n, with Q the largest power of two up to P; n more if P > Q.
    Source: Rabenseifner 2004, "Optimization of collective reduction operations".
    """
    folded = FoldedRanks(size)
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
    regions=per_segment,
    segmented=True,
    rounds=lambda size, segments: 2 * ceil_log2(size) * segments,
    sent=lambda size, segments: ceil_log2(size),
    at_most=True,
)
def binomial_tree(rank: int, size: int, segments: int = 1) -> Iterator[Round]:
    """Reduce to rank 0, then broadcast from it; segments move up the tree while earlier ones move down.

    Rounds: 2 ceil(log2 P) for one segment; for S segments at most S times as many, and about half of that for large S.
    Bytes sent per rank: n ceil(log2 P), by rank 0.
    Source: Thakur, Rabenseifner & Gropp 2005, "Optimization of collective communication operations in MPICH".
    """
    tree = binomial(rank, size)
    spans = [chunk(index) for index in range(segments)]
    yield from overlay(reduce_up(tree, spans), send_down(tree, spans))


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
    """Reduce and broadcast each half of the data on a separate binary tree, both at once, in segments.

    The second tree is the first shifted by one rank: inner ranks of one are leaves of the other, which balances
    the work.
    Rounds: at most 4 ceil(log2 P) + 5 (S - 1) for S segments, each of n/(2 S) bytes. Bytes sent per rank: at most 2 n.
    Source: Sanders, Speck & Träff 2009, "Two-tree algorithms for full bandwidth broadcast, reduction and scan".
    """
    flows = []
    for half in range(2):
        tree = in_order(rank, size, first=half)
        spans = [chunk(index) for index in range(half * segments, (half + 1) * segments)]
        flows += [reduce_up(tree, spans), send_down(tree, spans)]
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
    """Send every chunk directly to its owner, which combines all at once and sends the result directly to all.

    No partial sums are sent: see the reduce-scatter of this name.
    Rounds: 2 (P - 1) if the messages match in order, at most 3 (P - 1); all of a phase are posted at once.
    Bytes sent per rank: 2 (P - 1)/P n; n (P - 1)/P of memory for the received chunks.
    Source: Thakur, Rabenseifner & Gropp 2005, "Optimization of collective communication operations in MPICH" (pairwise
    exchange, posted at once).
    """
    yield from reduce_scatter.direct(rank, size)
    yield from all_gather.direct(rank, size)
