"""SequenceLayout: the positions of a sequence on each rank of an axis. [pure]"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import get_args

from commlib.errors import UsageError
from commlib.literals import SequenceOrder
from commlib.schedule.layout import even

ORDERS: tuple[str, ...] = get_args(SequenceOrder)


@dataclass(frozen=True, slots=True)
class SequenceLayout:
    """A sequence of any length, even shorter than the number of ranks, sharded among `size` ranks.

    order: "contiguous", one chunk for each rank; or "balanced", two of 2 * size chunks, the r-th from the front and the
    r-th from the back, which balances the work of all ranks in every step under a causal mask. Chunks differ by one
    position at most, the longer ones first.
    """

    length: int
    size: int
    order: str = "balanced"

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise UsageError(f"layout is {self.order!r}, expected {' or '.join(map(repr, ORDERS))}")
        if self.length < 0 or self.size < 1:
            raise UsageError(f"a sequence of {self.length} positions cannot be split among {self.size} ranks")

    def ranges(self, rank: int) -> tuple[range, ...]:
        """Return a rank's positions, ascending, in the order of its shard. Ranges are not empty, and not adjacent."""
        chunks = [rank] if self.order == "contiguous" else [rank, 2 * self.size - 1 - rank]
        cuts = even(self.length, self.size * len(chunks))
        result: list[range] = []
        for start, stop in map(cuts.slice_of, chunks):
            if result and result[-1].stop == start:
                result[-1] = range(result[-1].start, stop)
            elif start < stop:
                result.append(range(start, stop))
        return tuple(result)

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of positions of each rank."""
        return tuple(sum(map(len, self.ranges(rank))) for rank in range(self.size))

    @property
    def by_rank(self) -> tuple[range, ...]:
        """The ranges of positions of the full sequence that, concatenated, give the shards of ranks 0, 1, ..."""
        return tuple(positions for rank in range(self.size) for positions in self.ranges(rank))

    @property
    def in_order(self) -> tuple[range, ...]:
        """The ranges of the concatenated shards that give the full sequence: the inverse of `by_rank`."""
        places = self.by_rank
        starts = accumulate(map(len, places), initial=0)
        pairs = zip(places, starts, strict=False)
        return tuple(range(at, at + len(place)) for place, at in sorted(pairs, key=lambda pair: pair[0].start))


def document_bounds(documents: Iterable[int] | None, length: int) -> tuple[int, ...]:
    """Return the starts of documents, and at the end the sequence's length: (0, 5, 11) for lengths 5 and 6.

    documents: the same, such as the cumulative lengths ("cu_seqlens") of packed sequences, or None for one document.
    Empty documents are left out. Raises UsageError for bounds that descend, or do not go from 0 to the length.
    """
    bounds = (0, length) if documents is None else tuple(int(bound) for bound in documents)
    ascends = all(start <= stop for start, stop in pairwise(bounds))
    if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != length or not ascends:
        shown = bounds if len(bounds) < 9 else f"{bounds[:4]} ... {bounds[-4:]}"
        raise UsageError(
            f"documents are {shown}, expected the start of each document and the end of the last one, from 0 to "
            f"{length}, the length of the full sequence: (0, 5, 11) for documents of 5 and 6 tokens"
        )
    return (*(start for start, stop in pairwise(bounds) if start < stop), length)
