"""All-gather: rank r contributes chunk r; every rank ends with all `size` chunks."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from commlib.schedule.folding import FoldedRanks
from commlib.schedule.ir import Recv, Round, Send, Span
from commlib.schedule.registry import algorithm
from commlib.schedule.spans import ceil_log2, chunk, circular, floor_log2, per_rank, shift


@algorithm(
    "all_gather",
    "ring",
    regions=per_rank,
    rounds=lambda size, segments: size - 1,
    sent=lambda size, segments: Fraction(size - 1, size),
)
def ring(rank: int, size: int) -> Iterator[Round]:
    """Pass every chunk once around the ring.

    Rounds: P - 1. Bytes sent per rank: (P - 1)/P n.
    Source: Patarasuk & Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations".
    """
    right, left = (rank + 1) % size, (rank - 1) % size
    for step in range(size - 1):
        yield shift(right, chunk((rank - step) % size), left, chunk((rank - step - 1) % size))


def _doubling_sent(size: int, segments: int) -> Fraction:
    """Position 0 has the most ranks, so it sends most: its block at every width, and then the result."""
    folded = FoldedRanks(size)
    blocks = sum(folded.edge(1 << bit) for bit in range(floor_log2(size)))
    return Fraction(blocks + (size if folded.extra else 0), size)


@algorithm(
    "all_gather",
    "recursive_doubling",
    regions=per_rank,
    rounds=lambda size, segments: floor_log2(size) + 2 * bool(FoldedRanks(size).extra),
    sent=_doubling_sent,
)
def recursive_doubling(rank: int, size: int) -> Iterator[Round]:
    """Exchange all chunks held so far with a partner at twice the distance, until each rank has all.

    Rounds: log2 P; floor(log2 P) + 2 if P is no power of two. Bytes sent per rank: (P - 1)/P n; then less than 2 n.
    Source: Thakur, Rabenseifner & Gropp 2005, "Optimization of collective communication operations in MPICH".
    """
    folded = FoldedRanks(size)
    yield from folded.hand_in(rank, chunk(rank & ~1))
    yield from folded.doubling(rank, folded.edge)
    yield from folded.hand_back(rank, Span(0, size))


@algorithm(
    "all_gather",
    "bruck",
    regions=per_rank,
    rounds=lambda size, segments: ceil_log2(size),
    sent=lambda size, segments: Fraction(size - 1, size),
)
def bruck(rank: int, size: int) -> Iterator[Round]:
    """Send all chunks held so far to the rank 1, 2, 4, ... below: few rounds and bytes for any number of ranks.

    The chunks have their final positions throughout, so the final rotation of the original is not needed.
    Rounds: ceil(log2 P). Bytes sent per rank: (P - 1)/P n, in up to two pieces a round where chunks wrap around.
    Source: Bruck et al. 1997, "Efficient algorithms for all-to-all communications in multiport message-passing
    systems".
    """
    distance = 1
    while distance < size:
        length = min(distance, size - distance)
        to, source = (rank - distance) % size, (rank + distance) % size
        yield Round(
            sends=tuple(Send(to, span) for span in circular(rank, length, size)),
            recvs=tuple(Recv(source, span) for span in circular(source, length, size)),
        )
        distance *= 2


@algorithm(
    "all_gather",
    "direct",
    regions=per_rank,
    rounds=lambda size, segments: 3 * (size - 1) // 2 + 1,
    sent=lambda size, segments: Fraction(size - 1, size),
    at_most=True,
)
def direct(rank: int, size: int) -> Iterator[Round]:
    """Send each rank's chunk directly to all others.

    Rounds: P - 1 if the messages match in order, at most 3/2 as many; all are posted at once.
    Bytes sent per rank: (P - 1)/P n.
    Source: Thakur, Rabenseifner & Gropp 2005, "Optimization of collective communication operations in MPICH" (pairwise
    exchange, posted at once).
    """
    others = [(rank + distance) % size for distance in range(1, size)]
    if others:
        yield Round(
            sends=tuple(Send(peer, chunk(rank)) for peer in others),
            recvs=tuple(Recv(peer, chunk(peer)) for peer in reversed(others)),
        )
