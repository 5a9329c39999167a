"""From chunks to elements: where each chunk of a region begins and ends."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate, pairwise

from commlib.errors import UsageError
from commlib.schedule.ir import Span


@dataclass(frozen=True, slots=True)
class Layout:
    """Chunk i of a region holds the elements `offsets[i]`, ..., `offsets[i + 1] - 1`."""

    offsets: tuple[int, ...]

    @property
    def chunks(self) -> int:
        return len(self.offsets) - 1

    @property
    def count(self) -> int:
        return self.offsets[-1]

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of elements of each chunk."""
        return tuple(stop - start for start, stop in pairwise(self.offsets))

    @property
    def is_even(self) -> bool:
        """Whether all chunks have the same number of elements."""
        return len(set(self.counts)) <= 1

    def slice(self, span: Span) -> tuple[int, int]:
        """Return the first element of a span and the one after its last."""
        return self.offsets[span.start], self.offsets[span.stop]

    def length(self, span: Span) -> int:
        """Return the number of elements of a span."""
        return self.offsets[span.stop] - self.offsets[span.start]


def even(count: int, chunks: int) -> Layout:
    """Split `count` elements into chunks whose sizes differ by at most one, the larger ones first."""
    if count < 0 or chunks < 1:
        raise UsageError(f"cannot split {count} elements into {chunks} chunks")
    size, larger = divmod(count, chunks)
    return Layout(tuple(size * index + min(index, larger) for index in range(chunks + 1)))


def uneven(counts: Iterable[int]) -> Layout:
    """Lay chunks of the given sizes one after another."""
    sizes = tuple(counts)
    if any(size < 0 for size in sizes):
        raise UsageError(f"chunk sizes must not be negative, got {list(sizes)}")
    return Layout(tuple(accumulate(sizes, initial=0)))


def segmented(count: int, chunks: int, limit: int) -> list[tuple[int, Layout]]:
    """Split a large buffer into blocks to run a program over one after another, no chunk above `limit` elements.

    Returns (first element, layout) of each block, at least one. The blocks differ by at most one element.
    """
    if limit < 1:
        raise UsageError(f"a chunk needs room for at least one element, got limit={limit}")
    blocks = even(count, max(1, -(-count // (chunks * limit))))
    return [(start, even(size, chunks)) for start, size in zip(blocks.offsets[:-1], blocks.counts, strict=True)]
