"""Sharding: the shard of a weight on each rank of an axis. [pure]"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from commlib.errors import UsageError
from commlib.schedule.layout import even


@dataclass(frozen=True, slots=True)
class Sharding:
    """One dimension of an array, sharded among the ranks of an axis.

    shape: of the full array. dim: the dimension, from 0. parts: consecutive lengths that are sharded separately, such
    as those of Q, K and V in one weight. units: number of pieces of a part that are not split, such as heads; the first
    ranks have one more if they are uneven. By default every element is a unit; a tuple has the number for each part.
    shared: there may be fewer units than ranks, if they divide the number of ranks: equally many consecutive ranks have
    the same unit.

        Sharding((1536, 512), 0, parts=(512, 512, 512), units=8): 4 heads of Q, 4 of K and 4 of V on each of 2 ranks
        Sharding((640, 512), 0, parts=(512, 64, 64), units=(8, 1, 1), shared=True): 4 heads of Q, and K and V in full
    """

    shape: tuple[int, ...]
    dim: int
    parts: tuple[int, ...] = ()
    units: int | tuple[int, ...] = 0
    shared: bool = field(default=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 0 <= self.dim < len(self.shape):
            raise UsageError(f"an array of shape {list(self.shape)} has no dimension {self.dim} to shard")
        length = self.shape[self.dim]
        if sum(self.parts or (length,)) != length or min(self.parts, default=1) < 1:
            raise UsageError(
                f"parts {list(self.parts)} add up to {sum(self.parts)}, expected positive ones: {length}, "
                f"dimension {self.dim} of an array of shape {list(self.shape)}"
            )
        if not isinstance(self.units, int) and len(self.units) != len(self.parts or (length,)):
            raise UsageError(
                f"units {list(self.units)} of parts {list(self.parts or (length,))}: expected one number for each"
            )
        for part, units in self._parts():
            if units and part % units:
                raise UsageError(
                    f"a part of length {part} cannot be split into {units} equal units: dimension {self.dim} of an "
                    f"array of shape {list(self.shape)}"
                )

    def _parts(self) -> list[tuple[int, int]]:
        """Return the length of each part, and its units."""
        parts = self.parts or (self.shape[self.dim],)
        units = (self.units,) * len(parts) if isinstance(self.units, int) else self.units
        return list(zip(parts, units, strict=True))

    def may_share(self, size: int) -> bool:
        """Return whether some of `size` ranks may have the same piece of a part."""
        return self.shared and (not isinstance(self.units, int) or 0 < self.units < size)

    def copies(self, size: int) -> int:
        """Return how many of `size` ranks have the same full shard: 1 unless there are fewer units than ranks."""
        return min(self.copies_of_parts(size))

    def copies_of_parts(self, size: int) -> tuple[int, ...]:
        """Return for each part how many of `size` ranks have the same piece."""
        fewer = [self.shared and 0 < units < size and size % units == 0 for _, units in self._parts()]
        return tuple(size // units if one else 1 for one, (_, units) in zip(fewer, self._parts(), strict=True))

    def sharing(self, rank: int, size: int) -> list[tuple[int, int, int]]:
        """Return (ranks with the same piece, first and last in the shard) for each part on one of `size` ranks."""
        spans, copies = self.spans(rank, size), self.copies_of_parts(size)
        ends = accumulate(stop - start for start, stop in spans)
        return [(count, end - stop + start, end) for count, end, (start, stop) in zip(copies, ends, spans, strict=True)]

    def spans(self, rank: int, size: int) -> tuple[tuple[int, int], ...]:
        """Return the spans of the pieces of one of `size` ranks along the dimension, one for each part."""
        result, start = [], 0
        for (part, count), copies in zip(self._parts(), self.copies_of_parts(size), strict=True):
            units = count or part
            first, last = even(units, size // copies).slice_of(rank // copies)
            result.append((start + first * part // units, start + last * part // units))
            start += part
        return tuple(result)

    def length(self, rank: int, size: int) -> int:
        """Return the length of the dimension on one of `size` ranks."""
        return sum(stop - start for start, stop in self.spans(rank, size))

    def lengths(self, size: int) -> tuple[int, ...]:
        """Return the length of the dimension on each rank."""
        return tuple(self.length(rank, size) for rank in range(size))

    def local(self, rank: int, size: int) -> tuple[int, ...]:
        """Return the shape of a rank's shard."""
        return (*self.shape[: self.dim], self.length(rank, size), *self.shape[self.dim + 1 :])

    def pieces(self, size: int) -> list[tuple[int, int, int, int]]:
        """Return (rank, first and last in its shard, first in the full array) of all pieces, in its order."""
        result = []
        for rank in range(size):
            for (copies, first, last), (start, stop) in zip(
                self.sharing(rank, size), self.spans(rank, size), strict=True
            ):
                if start < stop and rank % copies == 0:
                    result.append((rank, first, last, start))
        return sorted(result, key=lambda piece: piece[3])

    def check(self, what: str, size: int) -> None:
        """Raise UsageError unless each of `size` ranks gets at least one unit."""
        least = [self.length(rank, size) for rank in range(size)]
        if not isinstance(self.units, int):
            least = [stop - start for rank in range(size) for start, stop in self.spans(rank, size)]
        if min(least) < 1:
            units = min(units or part for part, units in self._parts())
            raise UsageError(
                f"{what}: {units} units along dimension {self.dim} of shape {list(self.shape)} cannot be split among "
                f"{size} ranks: use a smaller axis, or leave it whole (Replicate)"
            )


@dataclass(frozen=True, slots=True)
class ScatteredRows:
    """The rows of an array, each on the rank `owners[row]`; a rank has its rows in ascending order.

    shape: of the full array.
    """

    shape: tuple[int, ...]
    owners: tuple[int, ...]

    def spans(self, rank: int, size: int) -> tuple[tuple[int, int], ...]:
        """Return the spans of the rows of a rank, one by one."""
        return tuple((row, row + 1) for row, owner in enumerate(self.owners) if owner == rank)

    def length(self, rank: int, size: int) -> int:
        """Return the number of rows of a rank."""
        return self.owners.count(rank)

    def lengths(self, size: int) -> tuple[int, ...]:
        """Return the number of rows of each rank."""
        return tuple(self.owners.count(rank) for rank in range(size))

    def local(self, rank: int, size: int) -> tuple[int, ...]:
        """Return the shape of a rank's shard."""
        return (self.length(rank, size), *self.shape[1:])

    def pieces(self, size: int) -> list[tuple[int, int, int, int]]:
        """Return (rank, first and last in its shard, first in the full array) of all pieces, in its order."""
        seen = [0] * size
        result = []
        for row, owner in enumerate(self.owners):
            result.append((owner, seen[owner], seen[owner] + 1, row))
            seen[owner] += 1
        return result

    def check(self, what: str, size: int) -> None:
        """Raise UsageError unless each rank gets at least one row."""
        if min(self.lengths(size)) < 1:
            raise UsageError(f"{what}: rows are on ranks {list(self.owners)}: each of {size} ranks needs at least one")

    @property
    def dim(self) -> int:
        """The sharded dimension."""
        return 0


@dataclass(frozen=True, slots=True)
class NestedSharding:
    """Two dimensions of an array, sharded over a product of two axes; the rank along the second one varies fastest.

    outer: the sharding along the first axis. inner: along the second, which has `ranks`. Both have the shape of the
    full array, and different dimensions.
    """

    outer: Sharding | ScatteredRows
    inner: Sharding
    ranks: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the full array."""
        return self.outer.shape

    def local(self, rank: int, size: int) -> tuple[int, ...]:
        """Return the shape of a rank's shard."""
        parts = list(self.outer.local(rank // self.ranks, size // self.ranks))
        parts[self.inner.dim] = self.inner.length(rank % self.ranks, self.ranks)
        return tuple(parts)

    def lengths(self, size: int) -> tuple[int, ...]:
        """Return the length of the outer dimension on each rank."""
        return tuple(self.outer.length(rank // self.ranks, size // self.ranks) for rank in range(size))

    def check(self, what: str, size: int) -> None:
        """Raise UsageError unless each rank gets at least one unit."""
        self.outer.check(what, size // self.ranks)
        self.inner.check(what, self.ranks)


def parts_of(what: str, parts: int | Sequence[int], length: int) -> tuple[int, ...]:
    """Return the lengths of parts, given as their number or as lengths. Raises UsageError."""
    if isinstance(parts, int):
        if parts < 1 or length % parts:
            raise UsageError(f"{what}: parts={parts}, but {length} outputs cannot be split into as many equal parts")
        return (length // parts,) * parts if parts > 1 else ()
    return tuple(parts)


AnySharding = Sharding | ScatteredRows | NestedSharding
"""The sharding of an array."""
