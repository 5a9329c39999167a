"""Reduce-scatter: every rank contributes `size` chunks; rank r ends with chunk r summed over all ranks.

The other chunks serve as working space: they hold partial sums at the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from commlib.schedule.folding import FoldedRanks
from commlib.schedule.ir import Recv, Round, Send, Span
from commlib.schedule.registry import algorithm
from commlib.schedule.spans import ceil_log2, chunk, circular, floor_log2, per_rank, shift


@algorithm(
    "reduce_scatter",
    "ring",
    regions=per_rank,
    rounds=lambda size, segments: size - 1,
    sent=lambda size, segments: Fraction(size - 1, size),
)
def ring(rank: int, size: int) -> Iterator[Round]:
    """Pass partial sums around the ring; each chunk starts behind its owner and ends there.

    Rounds: P - 1. Bytes sent per rank: (P - 1)/P n.
    Source: Patarasuk & Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations".
    """
    right, left = (rank + 1) % size, (rank - 1) % size
    for step in range(1, size):
        yield shift(right, chunk((rank - step) % size), left, chunk((rank - step - 1) % size), reduce=True)


@algorithm(
    "reduce_scatter",
    "recursive_halving",
    regions=per_rank,
    rounds=lambda size, segments: floor_log2(size) + 2 * bool(FoldedRanks(size).extra),
    sent=lambda size, segments: 1 if FoldedRanks(size).extra else Fraction(size - 1, size),
)
def recursive_halving(rank: int, size: int) -> Iterator[Round]:
    """Exchange half of the remaining chunks with a partner at half the distance, until only the rank's chunk remains.

    Rounds: log2 P; floor(log2 P) + 2 if P is no power of two. Bytes sent per rank: (P - 1)/P n; then at most n.
    Source: Thakur, Rabenseifner & Gropp 2005, "Optimization of collective communication operations in MPICH".
    """
    folded = FoldedRanks(size)
    yield from folded.hand_in(rank, Span(0, size), reduce=True)
    yield from folded.halving(rank, folded.edge)
    yield from folded.hand_back(rank, chunk(rank & ~1))


@algorithm(
    "reduce_scatter",
    "bruck",
    regions=per_rank,
    rounds=lambda size, segments: ceil_log2(size),
    sent=lambda size, segments: Fraction(size - 1, size),
)
def bruck(rank: int, size: int) -> Iterator[Round]:
    """Run Bruck's all-gather in reverse: the fewest rounds and the fewest bytes for any number of ranks.

    Rounds: ceil(log2 P). Bytes sent per rank: (P - 1)/P n, in up to two pieces a round where chunks wrap around.
    Source: Bruck et al. 1997, "Efficient algorithms for all-to-all communications in multiport message-passing
    systems"; Träff 2024, "Optimal, non-pipelined reduce-scatter and allreduce algorithms".
    """
    distance = 1 << ceil_log2(size)
    while distance := distance // 2:
        length = min(distance, size - distance)
        to, source = (rank + distance) % size, (rank - distance) % size
        yield Round(
            sends=tuple(Send(to, span) for span in circular(to, length, size)),
            recvs=tuple(Recv(source, span, reduce=True) for span in circular(rank, length, size)),
        )


@algorithm(
    "reduce_scatter",
    "direct",
    regions=per_rank,
    rounds=lambda size, segments: 3 * (size - 1) // 2 + 1,
    sent=lambda size, segments: Fraction(size - 1, size),
    at_most=True,
)
def direct(rank: int, size: int) -> Iterator[Round]:
    """Send every chunk directly to its owner, which combines all of them at once.

    No partial sums are sent, so half precision needs no wider messages, and the sum is in rank order.
    Rounds: P - 1 if the messages match in order, at most 3/2 as many; all are posted at once.
    Bytes sent per rank: (P - 1)/P n; as much memory for the received chunks.
    Source: Thakur, Rabenseifner & Gropp 2005, "Optimization of collective communication operations in MPICH" (pairwise
    exchange, posted at once).
    """
    others = [(rank + distance) % size for distance in range(1, size)]
    if others:
        yield Round(
            sends=tuple(Send(peer, chunk(peer)) for peer in others),
            recvs=tuple(Recv(peer, chunk(rank), reduce=True) for peer in reversed(others)),
        )
