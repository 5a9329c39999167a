"""Folding: recursive halving and doubling among any number of ranks.

Pairwise exchanges at distance 1, 2, 4, ... need a power of two. The largest power of two up to `size` is the size of
the *core*; the `extra` other ranks are the even ones among the first `2 * extra` ranks. Each sends its data to its odd
neighbour, which participates for both and returns the result. Core ranks are numbered by `position`.

Chunks: position p owns the chunks from `edge(p)` up to `edge(p + 1)`, always contiguous, so every message is one span.
Source: Thakur, Rabenseifner & Gropp 2005, "Optimization of collective communication operations in MPICH".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from commlib.schedule.ir import Recv, Round, Send, Span
from commlib.schedule.spans import floor_log2, shift

Edge = Callable[[int], int]


@dataclass(frozen=True, slots=True)
class FoldedRanks:
    """The folding of `size` ranks onto a power of two."""

    size: int

    @property
    def core(self) -> int:
        return 1 << floor_log2(self.size)

    @property
    def extra(self) -> int:
        return self.size - self.core

    def position(self, rank: int) -> int | None:
        """Return the rank's position in the core; None for an extra rank."""
        if rank >= 2 * self.extra:
            return rank - self.extra
        return rank // 2 if rank % 2 else None

    def rank(self, position: int) -> int:
        """Return the rank at a position of the core."""
        return 2 * position + 1 if position < self.extra else position + self.extra

    def edge(self, position: int) -> int:
        """Return the first chunk of a position if each rank owns one chunk: a pair's two, or one rank's."""
        return position + min(position, self.extra)

    def hand_in(self, rank: int, span: Span, *, reduce: bool = False) -> Iterator[Round]:
        """Send the data of the extra ranks to their neighbours."""
        if rank < 2 * self.extra:
            yield Round(recvs=(Recv(rank - 1, span, reduce),)) if rank % 2 else Round(sends=(Send(rank + 1, span),))

    def hand_back(self, rank: int, span: Span) -> Iterator[Round]:
        """Return the result to the extra ranks."""
        if rank < 2 * self.extra:
            yield Round(sends=(Send(rank - 1, span),)) if rank % 2 else Round(recvs=(Recv(rank + 1, span),))

    def halving(self, rank: int, edge: Edge) -> Iterator[Round]:
        """Reduce-scatter in the core: exchange the far half first, then ever smaller halves, down to one position."""
        position = self.position(rank)
        if position is None:
            return
        width = self.core // 2
        while width:
            keep = position - position % width
            give = keep ^ width
            peer = self.rank(position ^ width)
            send_span, keep_span = Span(edge(give), edge(give + width)), Span(edge(keep), edge(keep + width))
            yield shift(peer, send_span, peer, keep_span, reduce=True)
            width //= 2

    def doubling(self, rank: int, edge: Edge) -> Iterator[Round]:
        """All-gather in the core: halving in reverse."""
        position = self.position(rank)
        if position is None:
            return
        width = 1
        while width < self.core:
            have = position - position % width
            want = have ^ width
            peer = self.rank(position ^ width)
            yield shift(peer, Span(edge(have), edge(have + width)), peer, Span(edge(want), edge(want + width)))
            width *= 2
