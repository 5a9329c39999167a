"""Layout: the positions of a sequence that each rank of an axis has. [pure]"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate, pairwise

from commlib.errors import UsageError
from commlib.schedule.layout import even

ORDERS = ("balanced", "contiguous")


@dataclass(frozen=True, slots=True)
class Layout:
    """A sequence of any length, also one shorter than the number of ranks, divided among `size` ranks.

    order: "contiguous", one chunk for each rank; or "balanced", two of 2 * size chunks, the r-th from the front and the
    r-th from the back, so that under a causal mask all ranks see as many pairs in every step. Chunks differ by one
    position at most, the longer ones first.
    """

    length: int
    size: int
    order: str = "balanced"

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise UsageError(f"layout is {self.order!r}, expected {' or '.join(map(repr, ORDERS))}")
        if self.length < 0 or self.size < 1:
            raise UsageError(f"a sequence of {self.length} positions cannot be divided among {self.size} ranks")

    def ranges(self, rank: int) -> tuple[range, ...]:
        """Return a rank's positions, ascending, as they lie in its shard. No range is empty, and no two touch."""
        chunks = [rank] if self.order == "contiguous" else [rank, 2 * self.size - 1 - rank]
        cuts = even(self.length, self.size * len(chunks))
        found: list[range] = []
        for start, stop in map(cuts.slice_of, chunks):
            if found and found[-1].stop == start:
                found[-1] = range(found[-1].start, stop)
            elif start < stop:
                found.append(range(start, stop))
        return tuple(found)

    @property
    def counts(self) -> tuple[int, ...]:
        """How many positions each rank has."""
        return tuple(sum(map(len, self.ranges(rank))) for rank in range(self.size))

    @property
    def by_rank(self) -> tuple[range, ...]:
        """The ranges of positions that make, one behind another, of the whole the shards of ranks 0, 1, ..."""
        return tuple(positions for rank in range(self.size) for positions in self.ranges(rank))

    @property
    def in_order(self) -> tuple[range, ...]:
        """The ranges that make, one behind another, of the shards of ranks 0, 1, ... the whole: `by_rank` undone."""
        places = self.by_rank
        starts = accumulate(map(len, places), initial=0)
        found = zip(places, starts, strict=False)
        return tuple(range(at, at + len(place)) for place, at in sorted(found, key=lambda pair: pair[0].start))


def document_bounds(documents: Iterable[int] | None, length: int) -> tuple[int, ...]:
    """Return where documents begin, and at the end the sequence's length: (0, 5, 11) for two of lengths 5 and 6.

    documents: the same, such as the cumulative lengths ("cu_seqlens") of packed sequences, or None for one document.
    Empty documents are left out. Raises UsageError for bounds that descend, or do not go from 0 to the length.
    """
    bounds = (0, length) if documents is None else tuple(int(bound) for bound in documents)
    ascends = all(start <= stop for start, stop in pairwise(bounds))
    if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != length or not ascends:
        shown = bounds if len(bounds) < 9 else f"{bounds[:4]} ... {bounds[-4:]}"
        raise UsageError(
            f"documents are {shown}, expected where each begins and where the last ends, from 0 up to {length}, the "
            "length of the whole sequence: (0, 5, 11) for documents of 5 and 6 tokens"
        )
    return (*(start for start, stop in pairwise(bounds) if start < stop), length)
