"""All-to-all: input chunk d of rank s ends as output chunk s of rank d.

Regions: the input, which does not change, and the output, with `size` chunks each; then scratch.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from commlib.schedule.ir import Copy, Round, Span
from commlib.schedule.registry import algorithm
from commlib.schedule.spans import ceil_log2, chunk, circular, shift


@algorithm(
    "all_to_all",
    "pairwise",
    regions=lambda size, segments: (size, size),
    rounds=lambda size, segments: size - 1,
    sent=lambda size, segments: Fraction(size - 1, size),
)
def pairwise(rank: int, size: int) -> Iterator[Round]:
    """Send each chunk directly to its rank: in round i to the rank i above.

    Rounds: P - 1. Bytes sent per rank: (P - 1)/P n.
    Source: Thakur, Rabenseifner & Gropp 2005, "Optimization of collective communication operations in MPICH".
    """
    yield Round(copies=(Copy(chunk(rank), chunk(size + rank)),))
    for distance in range(1, size):
        to, source = (rank + distance) % size, (rank - distance) % size
        yield shift(to, chunk(to), source, chunk(size + source))


def _runs(bit: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield the runs (first, length) of the numbers below `size` that have a bit set."""
    width = 1 << bit
    for first in range(width, size, 2 * width):
        yield first, min(width, size - first)


@algorithm(
    "all_to_all",
    "bruck",
    regions=lambda size, segments: (size, size, (size + 1) // 2, (size + 1) // 2),
    rounds=lambda size, segments: ceil_log2(size),
    sent=lambda size, segments: Fraction(sum(distance.bit_count() for distance in range(size)), size),
    even_only=True,
)
def bruck(rank: int, size: int) -> Iterator[Round]:
    """In round i, send all chunks with bit i set in their distance to the rank 2^i above, in one message.

    A chunk with the remaining distance d is in slot (rank - d) of the output on each rank that it passes. So it ends in
    the slot of its source rank, and no final rotation is needed.
    Rounds: ceil(log2 P). Bytes sent per rank: about n/2 log2 P (as many chunks as there are bits set in 0..P - 1).
    Source: Bruck et al. 1997, "Efficient algorithms for all-to-all communications in multiport message-passing
    systems"; Träff, Rougier & Hunold 2014, "Implementing a classic: zero-copy all-to-all communication ...".
    """
    packed, arrived = 2 * size, 2 * size + (size + 1) // 2
    copies = [Copy(chunk((rank + way) % size), chunk(size + (rank - way) % size)) for way in range(size)]
    for bit in range(ceil_log2(size)):
        pack, unpack = [], []
        count = 0
        for first, length in _runs(bit, size):
            for slots in circular(rank - first - length + 1, length, size):
                here = Span(size + slots.start, size + slots.stop)
                pack.append(Copy(here, Span(packed + count, packed + count + len(slots))))
                unpack.append(Copy(Span(arrived + count, arrived + count + len(slots)), here))
                count += len(slots)
        distance = 1 << bit
        message, room = Span(packed, packed + count), Span(arrived, arrived + count)
        step = shift((rank + distance) % size, message, (rank - distance) % size, room)
        yield Round(step.sends, step.recvs, tuple(copies + pack))
        copies = unpack
    yield Round(copies=tuple(copies))
