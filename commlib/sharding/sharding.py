"""Sharding: which part of a weight each rank of an axis keeps. [pure]"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from commlib.errors import UsageError
from commlib.schedule.layout import even


@dataclass(frozen=True, slots=True)
class Sharding:
    """One dimension of an array, divided among the ranks of an axis.

    shape: of the whole array. dim: the dimension, from 0. parts: its lengths that are divided each by itself, one after
    another, such as those of Q, K and V in one weight. units: how many pieces of a part stay whole, such as heads; the
    first ranks have one more where they do not go up. By default every element may stand alone; of parts that differ
    there is a number for each. shared: units may be fewer than the ranks, and divide their number: as many ranks, one
    after another, have the same unit.

        Sharding((1536, 512), 0, parts=(512, 512, 512), units=8): 4 heads of Q, 4 of K and 4 of V on each of 2 ranks
        Sharding((640, 512), 0, parts=(512, 64, 64), units=(8, 1, 1), shared=True): 4 heads of Q, and K and V whole
    """

    shape: tuple[int, ...]
    dim: int
    parts: tuple[int, ...] = ()
    units: int | tuple[int, ...] = 0
    shared: bool = field(default=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 0 <= self.dim < len(self.shape):
            raise UsageError(f"an array of shape {list(self.shape)} has no dimension {self.dim} to be divided")
        length = self.shape[self.dim]
        if sum(self.parts or (length,)) != length or min(self.parts, default=1) < 1:
            raise UsageError(
                f"parts {list(self.parts)} add up to {sum(self.parts)}, expected positive ones: {length}, "
                f"dimension {self.dim} of an array of shape {list(self.shape)}"
            )
        if not isinstance(self.units, int) and len(self.units) != len(self.parts or (length,)):
            raise UsageError(
                f"units {list(self.units)} of parts {list(self.parts or (length,))}: expected one for each"
            )
        for part, units in self._parts():
            if units and part % units:
                raise UsageError(
                    f"a part of length {part} has no {units} equal units: dimension {self.dim} of an array of "
                    f"shape {list(self.shape)}"
                )

    def _parts(self) -> list[tuple[int, int]]:
        """Return the length of each part, and its units."""
        parts = self.parts or (self.shape[self.dim],)
        units = (self.units,) * len(parts) if isinstance(self.units, int) else self.units
        return list(zip(parts, units, strict=True))

    def may_share(self, size: int) -> bool:
        """Return whether some of `size` ranks may have the same of a part."""
        return self.shared and (not isinstance(self.units, int) or 0 < self.units < size)

    def copies(self, size: int) -> int:
        """Return how many of `size` ranks have the same part, all of it: 1 unless there are fewer units than ranks."""
        return min(self.copies_of_parts(size))

    def copies_of_parts(self, size: int) -> tuple[int, ...]:
        """Return how many of `size` ranks have the same of each of the parts."""
        fewer = [self.shared and 0 < units < size and size % units == 0 for _, units in self._parts()]
        return tuple(size // units if one else 1 for one, (_, units) in zip(fewer, self._parts(), strict=True))

    def sharing(self, rank: int, size: int) -> list[tuple[int, int, int]]:
        """Return (how many ranks have the same, first and last) of what one of `size` ranks has, part by part."""
        spans, copies = self.spans(rank, size), self.copies_of_parts(size)
        ends = accumulate(stop - start for start, stop in spans)
        return [(count, end - stop + start, end) for count, end, (start, stop) in zip(copies, ends, spans, strict=True)]

    def spans(self, rank: int, size: int) -> tuple[tuple[int, int], ...]:
        """Return where the pieces of one of `size` ranks begin and end along the dimension, one for each part."""
        found, start = [], 0
        for (part, count), copies in zip(self._parts(), self.copies_of_parts(size), strict=True):
            units = count or part
            first, last = even(units, size // copies).slice_of(rank // copies)
            found.append((start + first * part // units, start + last * part // units))
            start += part
        return tuple(found)

    def length(self, rank: int, size: int) -> int:
        """Return how long the dimension is on one of `size` ranks."""
        return sum(stop - start for start, stop in self.spans(rank, size))

    def lengths(self, size: int) -> tuple[int, ...]:
        """Return how long the dimension is on each rank."""
        return tuple(self.length(rank, size) for rank in range(size))

    def local(self, rank: int, size: int) -> tuple[int, ...]:
        """Return the shape of what a rank keeps."""
        return (*self.shape[: self.dim], self.length(rank, size), *self.shape[self.dim + 1 :])

    def pieces(self, size: int) -> list[tuple[int, int, int, int]]:
        """Return (rank, first and last in its shard, first in the whole) of all pieces, in the order of the whole."""
        found = []
        for rank in range(size):
            for (copies, first, last), (start, stop) in zip(
                self.sharing(rank, size), self.spans(rank, size), strict=True
            ):
                if start < stop and rank % copies == 0:
                    found.append((rank, first, last, start))
        return sorted(found, key=lambda piece: piece[3])

    def check(self, what: str, size: int) -> None:
        """Raise UsageError unless each of `size` ranks gets something."""
        least = [self.length(rank, size) for rank in range(size)]
        if not isinstance(self.units, int):
            least = [stop - start for rank in range(size) for start, stop in self.spans(rank, size)]
        if min(least) < 1:
            units = min(units or part for part, units in self._parts())
            raise UsageError(
                f"{what}: {units} units along dimension {self.dim} of shape {list(self.shape)} cannot be divided among "
                f"{size} ranks: use a smaller axis, or leave it whole (Replicate)"
            )


@dataclass(frozen=True, slots=True)
class Scattered:
    """The rows of an array, each on the rank that `owners` says; a rank has its own in ascending order.

    shape: of the whole array.
    """

    shape: tuple[int, ...]
    owners: tuple[int, ...]

    def spans(self, rank: int, size: int) -> tuple[tuple[int, int], ...]:
        """Return where the rows of a rank begin and end, one by one."""
        return tuple((row, row + 1) for row, owner in enumerate(self.owners) if owner == rank)

    def length(self, rank: int, size: int) -> int:
        """Return how many rows a rank has."""
        return self.owners.count(rank)

    def lengths(self, size: int) -> tuple[int, ...]:
        """Return how many rows each rank has."""
        return tuple(self.owners.count(rank) for rank in range(size))

    def local(self, rank: int, size: int) -> tuple[int, ...]:
        """Return the shape of what a rank keeps."""
        return (self.length(rank, size), *self.shape[1:])

    def pieces(self, size: int) -> list[tuple[int, int, int, int]]:
        """Return (rank, first and last in its shard, first in the whole) of all pieces, in the order of the whole."""
        seen = [0] * size
        found = []
        for row, owner in enumerate(self.owners):
            found.append((owner, seen[owner], seen[owner] + 1, row))
            seen[owner] += 1
        return found

    def check(self, what: str, size: int) -> None:
        """Raise UsageError unless each rank gets something."""
        if min(self.lengths(size)) < 1:
            raise UsageError(f"{what}: rows on ranks {list(self.owners)}: each of {size} ranks needs one")

    @property
    def dim(self) -> int:
        """The dimension that is divided."""
        return 0


@dataclass(frozen=True, slots=True)
class Nested:
    """Two dimensions of an array, divided among the ranks of a product of two axes, of which the second is the faster.

    outer: how it is divided along the first axis. inner: along the second, which has `ranks`. Both are of the whole
    shape, and of other dimensions.
    """

    outer: Sharding | Scattered
    inner: Sharding
    ranks: int

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the whole array."""
        return self.outer.shape

    def local(self, rank: int, size: int) -> tuple[int, ...]:
        """Return the shape of what a rank keeps."""
        kept = list(self.outer.local(rank // self.ranks, size // self.ranks))
        kept[self.inner.dim] = self.inner.length(rank % self.ranks, self.ranks)
        return tuple(kept)

    def lengths(self, size: int) -> tuple[int, ...]:
        """Return how long the outer dimension is on each rank."""
        return tuple(self.outer.length(rank // self.ranks, size // self.ranks) for rank in range(size))

    def check(self, what: str, size: int) -> None:
        """Raise UsageError unless each rank gets something."""
        self.outer.check(what, size // self.ranks)
        self.inner.check(what, self.ranks)


def parts_of(what: str, parts: int | Sequence[int], length: int) -> tuple[int, ...]:
    """Return the lengths of parts, given as their number or as they are. Raises UsageError."""
    if isinstance(parts, int):
        if parts < 1 or length % parts:
            raise UsageError(f"{what}: parts={parts}, but {length} outputs are not as many equal parts")
        return (length // parts,) * parts if parts > 1 else ()
    return tuple(parts)


AnySharding = Sharding | Scattered | Nested
"""How an array is divided among ranks."""
