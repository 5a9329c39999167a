"""Shardings: spans of parts and units, compared with an array cut by hand; no element lost or repeated."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commlib.errors import UsageError
from commlib.sharding.data_axes import data_axes
from commlib.sharding.sharding import parts_of
from commlib.tensor_parallel import Sharding


def test_heads_of_q_k_and_v_are_divided() -> None:
    sharding = Sharding((24, 7), 0, parts=(16, 4, 4), units=4)
    assert sharding.spans(0, 2) == ((0, 8), (16, 18), (20, 22))
    assert sharding.spans(1, 2) == ((8, 16), (18, 20), (22, 24))
    assert sharding.local(1, 2) == (12, 7)


def test_the_first_ranks_get_the_remainder() -> None:
    assert Sharding((3, 7), 1).lengths(3) == (3, 2, 2)
    assert Sharding((12,), 0, units=3).lengths(2) == (8, 4)  # whole heads


@given(st.data())
def test_pieces_join_to_the_whole(data: st.DataObject) -> None:
    units = data.draw(st.integers(1, 6))
    parts = tuple(units * n for n in data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    size = data.draw(st.integers(1, 5))
    sharding = Sharding((sum(parts), 2), 0, parts, units)
    shards = [[i for span in sharding.spans(rank, size) for i in range(*span)] for rank in range(size)]
    assert sorted(i for shard in shards for i in shard) == list(range(sum(parts)))
    whole: list[int] = []
    for rank, first, last, start in sharding.pieces(size):
        assert start == len(whole)
        whole += shards[rank][first:last]
    assert whole == list(range(sum(parts)))
    assert sharding.lengths(size) == tuple(map(len, shards))


def test_indivisible_dimensions_are_refused() -> None:
    with pytest.raises(UsageError, match="has no dimension 2 to shard"):
        Sharding((3, 4), 2)
    with pytest.raises(UsageError, match=r"parts \[2, 3\] add up to 5, expected positive ones: 4, dimension 1"):
        Sharding((3, 4), 1, parts=(2, 3))
    with pytest.raises(UsageError, match="a part of length 4 cannot be split into 3 equal units"):
        Sharding((3, 4), 1, units=3)
    with pytest.raises(UsageError, match=r"up: 2 units along dimension 0 .* cannot be split among 3 ranks"):
        Sharding((8, 4), 0, units=2).check("up", 3)


def test_parts_can_be_a_number_or_lengths() -> None:
    assert parts_of("up", 1, 8) == ()
    assert parts_of("up", 2, 8) == (4, 4)
    assert parts_of("up", (6, 2), 8) == (6, 2)
    with pytest.raises(UsageError, match="up: parts=3, but 8 outputs cannot be split into as many equal parts"):
        parts_of("up", 3, 8)


def test_ranks_share_units_if_there_are_too_few() -> None:
    """Heads of keys that are fewer than ranks: each is on as many ranks, consecutive ones, and once in the whole."""
    sharding = Sharding((8, 3), 0, units=2, shared=True)
    assert [sharding.spans(rank, 4) for rank in range(4)] == [((0, 4),), ((0, 4),), ((4, 8),), ((4, 8),)]
    assert sharding.pieces(4) == [(0, 0, 4, 0), (2, 0, 4, 4)]
    assert [sharding.copies(size) for size in (1, 2, 3, 4, 6)] == [1, 1, 1, 2, 3]
    with pytest.raises(UsageError, match="cannot be split among 3 ranks"):
        sharding.check("k", 3)


def test_ranks_share_one_part_and_divide_another() -> None:
    """Heads of Q with one of K and one of V in one weight: before, either all or none of it was shared."""
    sharding = Sharding((12, 3), 0, parts=(8, 2, 2), units=(4, 1, 1), shared=True)
    assert sharding.spans(1, 2) == ((4, 8), (8, 10), (10, 12))
    assert sharding.lengths(3) == (8, 6, 6)
    assert sharding.copies_of_parts(2) == (1, 2, 2)
    assert sharding.sharing(1, 2) == [(1, 0, 4), (2, 4, 6), (2, 6, 8)]
    assert sharding.pieces(2) == [(0, 0, 4, 0), (1, 0, 4, 4), (0, 4, 6, 8), (0, 6, 8, 10)]
    sharding.check("qkv", 4)
    with pytest.raises(UsageError, match=r"qkv: 1 units along dimension 0 .* cannot be split among 5 ranks"):
        sharding.check("qkv", 5)
    with pytest.raises(UsageError, match=r"qkv: 1 units .* cannot be split among 2 ranks"):
        Sharding((12, 3), 0, parts=(8, 2, 2), units=(4, 1, 1)).check("qkv", 2)
    with pytest.raises(UsageError, match=r"units \[4, 1\] of parts \[8, 2, 2\]: expected one number for each"):
        Sharding((12, 3), 0, parts=(8, 2, 2), units=(4, 1))


@pytest.mark.parametrize("mesh", [3, "dp"])
def test_what_is_no_mesh_has_no_data_axes(mesh: object) -> None:
    with pytest.raises(UsageError, match=r"mesh= must be a commlib.Mesh, got"):
        data_axes(mesh)  # type: ignore[arg-type]
