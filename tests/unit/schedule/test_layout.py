"""Layouts: every element is in exactly one chunk."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commlib.errors import UsageError
from commlib.schedule import Span, blocks, cut, even, uneven

counts = st.integers(0, 10_000)
chunks = st.integers(1, 300)


@given(counts, chunks)
def test_even_layouts_cover_all_elements(count: int, chunks: int) -> None:
    layout = even(count, chunks)
    assert layout.chunks == chunks and layout.count == count == sum(layout.counts)
    assert max(layout.counts) - min(layout.counts) <= 1
    assert list(layout.counts) == sorted(layout.counts, reverse=True)
    assert (len(set(layout.counts)) == 1) == (count % chunks == 0)


@given(st.lists(st.integers(0, 50), max_size=40))
def test_uneven_layouts_cover_all_elements(sizes: list[int]) -> None:
    layout = uneven(sizes)
    assert list(layout.counts) == sizes
    assert layout.count == sum(sizes)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=40), st.data())
def test_adjacent_slices_join(sizes: list[int], data: st.DataObject) -> None:
    layout = uneven(sizes)
    a, b, c = sorted(data.draw(st.integers(0, len(sizes))) for _ in range(3))
    left, right = layout.slice(Span(a, b)), layout.slice(Span(b, c))
    assert left[1] == right[0]
    assert layout.slice(Span(a, c)) == (left[0], right[1])
    assert layout.length(Span(a, c)) == layout.length(Span(a, b)) + layout.length(Span(b, c)) == sum(sizes[a:c])


@given(counts, chunks, st.integers(1, 50))
def test_blocks_are_contiguous(count: int, chunks: int, number: int) -> None:
    position = 0
    for layout in blocks(count, chunks, number):
        assert layout.chunks == chunks
        assert layout.offsets[0] == position
        assert max(layout.counts) - min(layout.counts) <= 1
        position = layout.offsets[-1]
    assert position == count


@given(st.lists(st.integers(0, 50), min_size=1, max_size=20), st.integers(1, 9))
def test_slices_cover_every_chunk_once(sizes: list[int], pieces: int) -> None:
    layout = uneven(sizes)
    cuts = cut(layout, pieces)
    assert len(cuts) == pieces
    for number in range(len(sizes)):
        position, end = layout.slice_of(number)
        for piece in cuts:
            start, stop = piece.slice(Span(number, number + 1))
            assert start == position <= stop
            position = stop
        assert position == end


def test_slices_of_several_chunks_are_refused() -> None:
    with pytest.raises(UsageError, match="are not contiguous"):
        cut(even(10, 3), 2)[0].slice(Span(0, 2))


def test_invalid_layouts_are_refused() -> None:
    for wrong in (lambda: even(-1, 2), lambda: even(1, 0), lambda: uneven([1, -1])):
        with pytest.raises(UsageError):
            wrong()
