"""Plans of context parallelism: every visible pair exactly once, equal work, layouts of any length."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commlib.context_parallel import ORDERS, Heads, SequenceLayout, Window, document_bounds, draw, pairs, steps, window
from commlib.errors import UsageError

LENGTHS, SIZES = st.integers(0, 40), st.integers(1, 6)
WINDOWS = st.tuples(st.integers(-1, 14), st.integers(-1, 14))


@st.composite
def packed(draw_: st.DrawFn) -> tuple[int, tuple[int, ...]]:
    """Draw a length, and bounds of documents, some of them empty."""
    lengths = draw_(st.lists(st.integers(0, 12), min_size=1, max_size=6))
    return sum(lengths), tuple(sum(lengths[:number]) for number in range(len(lengths) + 1))


@given(LENGTHS, SIZES, st.sampled_from(ORDERS))
def test_each_position_is_on_one_rank(length: int, size: int, order: str) -> None:
    layout = SequenceLayout(length, size, order)
    owned = [position for positions in layout.by_rank for position in positions]
    assert sorted(owned) == list(range(length))
    assert [owned[at] for part in layout.in_order for at in part] == list(range(length))
    assert layout.counts == tuple(sum(len(part) for part in layout.ranges(rank)) for rank in range(size))
    for rank in range(size):
        ranges = layout.ranges(rank)
        assert all(ranges)
        assert all(first.stop < second.start for first, second in pairwise(ranges))
    assert max(layout.counts) - min(layout.counts) <= 2


@given(packed(), SIZES, st.sampled_from(ORDERS), st.booleans(), st.none() | WINDOWS, st.integers(1, 6))
def test_each_visible_pair_occurs_once(
    documents: tuple[int, tuple[int, ...]], size: int, order: str, causal: bool, sees: tuple[int, int] | None, rows: int
) -> None:
    """Other frameworks silently left out whole shards, or counted them twice."""
    length, given_bounds = documents
    reach = Window.of("here", sees, causal)
    left, right = (length if side is None else side for side in reach)
    layout, bounds = SequenceLayout(length, size, order), document_bounds(given_bounds, length)
    shards = [[position for part in layout.ranges(rank) for position in part] for rank in range(size)]
    pairs_: Counter[tuple[int, int]] = Counter()
    for rank in range(size):
        with pytest.MonkeyPatch.context() as patch:  # blocks of a few rows, as long sequences have them
            patch.setattr(window, "ROWS", rows)
            steps.cache_clear()
            plan = steps(layout, rank, causal, bounds, reach)
        assert [step.source for step in plan] == [(rank - number) % size for number in range(size)]
        for step in plan:
            for block in step.blocks:
                queries, keys = shards[rank][slice(*block.queries)], shards[step.source][slice(*block.keys)]
                low, high = block.band or (-length, length)
                seen = [
                    (q, k) for row, q in enumerate(queries) for column, k in enumerate(keys)
                    if (k <= q or not block.causal) and low <= column - row <= high
                ]  # fmt: skip
                assert len(seen) == block.pairs
                assert {q for q, _ in seen} == set(queries)  # every query sees a key
                assert not block.causal or queries == keys == list(range(queries[0], queries[-1] + 1))
                pairs_.update(seen)
    expected = {
        (q, k) for start, stop in pairwise(bounds) for q in range(start, stop) for k in range(start, stop)
        if (k <= q or not causal) and q - left <= k <= q + right
    }  # fmt: skip
    assert pairs_ == dict.fromkeys(expected, 1)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("per_chunk", [1, 4, 16])
def test_balanced_work_is_equal_in_each_step(size: int, per_chunk: int) -> None:
    length = 2 * size * per_chunk
    work = pairs(SequenceLayout(length, size, "balanced"), True, (0, length))
    assert len(set(work)) == 1
    assert len(set(work[0][1:])) <= 1


@given(st.integers(0, 200), SIZES)
def test_balanced_work_of_odd_lengths_differs_by_a_few_rows(length: int, size: int) -> None:
    """A chunk that is one longer has one more row, at most of all positions, in a rank's two chunks."""
    totals = [sum(row) for row in pairs(SequenceLayout(length, size), True, document_bounds(None, length))]
    assert max(totals) - min(totals) <= 2 * length


def test_contiguous_causal_work_is_not_equal() -> None:
    totals = [sum(row) for row in pairs(SequenceLayout(64, 4, "contiguous"), True, (0, 64))]
    assert totals == [136, 392, 648, 904]


def test_blocks_without_a_mask_are_as_large_as_possible() -> None:
    """Two chunks on each rank would be four calls where one does."""
    for rank in range(3):
        for step in steps(SequenceLayout(30, 3), rank, False, (0, 30)):
            assert [(block.queries, block.keys) for block in step.blocks] == [((0, 10), (0, 10))]
    assert [len(step.blocks) for step in steps(SequenceLayout(32, 4), 1, True, (0, 32))] == [3, 1, 1, 1]


def test_work_within_a_window_grows_with_the_window() -> None:
    """It does not grow with the sequence: invisible blocks are not computed, and most others have no mask."""
    length, reach = 1 << 16, Window(4095, 0)
    blocks = [block for step in steps(SequenceLayout(length, 4), 1, True, (0, length), reach) for block in step.blocks]
    areas = [(block.queries[1] - block.queries[0]) * (block.keys[1] - block.keys[0]) for block in blocks]
    assert sum(areas) < 1.6 * 4096 * length / 4
    assert sum(area for area, block in zip(areas, blocks, strict=True) if block.band is None) > 0.6 * sum(areas)


@pytest.mark.parametrize("given", [4096, (1, 2, 3), (-2, 0), (1.5, 0), (True, 0), "ab"], ids=str)
def test_an_invalid_window_is_refused(given: object) -> None:
    with pytest.raises(UsageError, match=r"expected \(left, right\)"):
        Window.of("attention", given, False)


def test_a_plan_has_a_picture() -> None:
    assert draw(SequenceLayout(16, 4), True, (0, 16)).splitlines() == [
        "        positions   step 0  step 1  step 2  step 3  pairs",
        "rank 0  0-1, 14-15  0: 10   3: 8    2: 8    1: 8    34",
        "rank 1  2-3, 12-13  1: 10   0: 8    3: 8    2: 8    34",
        "rank 2  4-5, 10-11  2: 10   1: 8    0: 8    3: 8    34",
        "rank 3  6-9         3: 10   2: 8    1: 8    0: 8    34",
    ]


def test_a_rank_without_positions_is_drawn() -> None:
    assert "rank 2  none" in draw(SequenceLayout(2, 3, "contiguous"), True, (0, 2))


@pytest.mark.parametrize("documents", [(), (0,), (1, 5), (0, 4), (0, 3, 2, 5), (0, 6)])
def test_invalid_document_bounds_are_refused(documents: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match="from 0 to 5"):
        document_bounds(documents, 5)


def test_empty_documents_are_left_out() -> None:
    assert document_bounds((0, 0, 2, 2, 5, 5), 5) == (0, 2, 5)
    assert document_bounds(None, 0) == document_bounds((0, 0), 0) == (0,)


def test_an_unknown_layout_is_refused() -> None:
    with pytest.raises(UsageError, match="'zigzag', expected 'balanced' or 'contiguous'"):
        SequenceLayout(8, 2, "zigzag")
    with pytest.raises(UsageError, match="among 0 ranks"):
        SequenceLayout(8, 0)


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 9))
def test_units_serve_all_heads(keys: int, served: int, size: int) -> None:
    heads = Heads(keys * served, keys, size)
    assert heads.units * heads.served == heads.queries
    assert heads.units == heads.keys * heads.copies
    assert sum(heads.lengths) == heads.units
    busiest = max(heads.lengths) * heads.served
    assert busiest == min(
        -(-keys * copies // size) * (served // copies) for copies in range(1, served + 1) if served % copies == 0
    )


@pytest.mark.parametrize(
    ("queries", "keys", "size", "copies"), [(8, 8, 4, 1), (8, 4, 4, 1), (8, 2, 4, 2), (8, 1, 4, 4), (6, 2, 3, 3)]
)
def test_keys_are_sent_as_rarely_as_possible(queries: int, keys: int, size: int, copies: int) -> None:
    assert Heads(queries, keys, size).copies == copies


@pytest.mark.parametrize(
    ("q", "k", "v", "message"),
    [
        ((2, 4, 8), (2, 4, 8), (2, 4, 8), "batch, heads, tokens, head_dim"),
        ((2, 4, 8, 5), (3, 4, 8, 5), (3, 4, 8, 5), "the same batch"),
        ((2, 4, 8, 5), (2, 4, 7, 5), (2, 4, 7, 5), "the same tokens"),
        ((2, 4, 8, 5), (2, 4, 8, 5), (2, 2, 8, 5), "equally many heads of k and v"),
        ((2, 4, 8, 5), (2, 4, 8, 6), (2, 4, 8, 5), "head_dim 5 and k 6"),
        ((2, 4, 8, 5), (2, 3, 8, 5), (2, 3, 8, 5), "are no multiple"),
        ((2, 4, 8, 5), (2, 0, 8, 5), (2, 0, 8, 5), "are no multiple"),
    ],
)
def test_mismatched_shapes_are_refused(
    q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        Heads.of("attention", q, k, v, 2)
