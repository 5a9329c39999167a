"""Layout: map the chunks of a region to ranges of elements."""

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

    def slice(self, span: Span) -> tuple[int, int]:
        """Return the first element of a span and the one after its last."""
        return self.offsets[span.start], self.offsets[span.stop]

    def slice_of(self, chunk: int) -> tuple[int, int]:
        """Return the first element of one chunk and the one after its last."""
        return self.offsets[chunk], self.offsets[chunk + 1]

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
    """Place chunks of the given sizes one after another."""
    sizes = tuple(counts)
    if any(size < 0 for size in sizes):
        raise UsageError(f"chunk sizes must not be negative, got {list(sizes)}")
    return Layout(tuple(accumulate(sizes, initial=0)))


@dataclass(frozen=True, slots=True)
class Slices:
    """One slice of every chunk of a layout: chunk i holds the elements `starts[i]`, ..., `stops[i] - 1`."""

    starts: tuple[int, ...]
    stops: tuple[int, ...]

    def slice(self, span: Span) -> tuple[int, int]:
        """Return the first element of a span of at most one chunk, and the one after its last."""
        if len(span) > 1:
            raise UsageError(f"slices of the chunks {span} are not contiguous")
        return (self.starts[span.start], self.stops[span.start]) if len(span) else (0, 0)


def cut(layout: Layout, pieces: int) -> list[Layout] | list[Slices]:
    """Cut every chunk into `pieces` slices; return the layout of the first slices, of the second, ...

    For programs that never send two chunks in one message.
    """
    if pieces == 1:
        return [layout]
    edges = [
        tuple(start + (stop - start) * index // pieces for start, stop in pairwise(layout.offsets))
        for index in range(pieces + 1)
    ]
    return [Slices(starts, stops) for starts, stops in pairwise(edges)]


def blocks(count: int, chunks: int, number: int) -> list[Layout]:
    """Split `count` elements into `number` contiguous blocks of `chunks` chunks each."""
    whole = even(count, number)
    return [
        Layout(tuple(first + offset for offset in even(size, chunks).offsets))
        for first, size in zip(whole.offsets, whole.counts, strict=False)
    ]
