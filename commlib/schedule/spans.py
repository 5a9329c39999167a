"""Helpers that several algorithms share: spans, numbers of chunks, and logarithms."""

from __future__ import annotations

from functools import lru_cache

from commlib.schedule.ir import Recv, Round, Send, Span


@lru_cache(maxsize=65536)
def chunk(index: int) -> Span:
    """Return the span of one chunk. Cached: spans are immutable, and rings need millions of them."""
    return Span(index, index + 1)


def circular(start: int, length: int, size: int) -> tuple[Span, ...]:
    """Return `length` chunks from `start` on, modulo `size` chunks: one span, or two if it wraps."""
    start %= size
    stop = start + length
    if stop <= size:
        return (Span(start, stop),) if length else ()
    return Span(start, size), Span(0, stop - size)


def shift(to: int, sent: Span, source: int, received: Span, *, reduce: bool = False) -> Round:
    """Return a round that sends one message and receives another, possibly from the same peer."""
    return Round((Send(to, sent),), (Recv(source, received, reduce),))


def floor_log2(size: int) -> int:
    return size.bit_length() - 1


def ceil_log2(size: int) -> int:
    return (size - 1).bit_length()


def per_segment(size: int, segments: int) -> tuple[int, ...]:
    """Regions: the data as one chunk for each segment of the pipeline."""
    return (segments,)


def per_rank(size: int, segments: int) -> tuple[int, ...]:
    """Regions: the data as one chunk for each rank."""
    return (size,)
