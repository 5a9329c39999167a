"""Planner: few experts change places, and the busiest rank gets less."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from commlib.communicator import Communicator
from commlib.expert.moving import move_experts
from commlib.expert.placement import ExpertPlacement
from commlib.expert.planner import imbalance, plan
from tests.bodies.loopback import run


def test_two_hot_experts_are_separated() -> None:
    before = ExpertPlacement.even(6, 2)
    after = plan([10, 10, 1, 1, 1, 1], before)
    assert sum(one != other for one, other in zip(before.owners, after.owners, strict=True)) == 2
    assert after.owners[0] != after.owners[1]
    assert (imbalance([10, 10, 1, 1, 1, 1], before), imbalance([10, 10, 1, 1, 1, 1], after)) == (1.75, 1.0)


def test_rounded_sums_do_not_move_experts_for_ever() -> None:
    """Two experts changed places for ever: their ranks were as busy, but for the last bit of a sum."""
    load = [share / 24 for share in (9, 9, 1, 1, 1, 1, 1, 1)]
    after = plan(load, ExpertPlacement.even(8, 4))
    assert after.owners[0] != after.owners[1] and plan(load, after) == after


@given(st.integers(1, 5), st.integers(1, 4), st.data())
def test_plans_keep_the_number_of_experts_and_reduce_the_load(ranks: int, each: int, data: st.DataObject) -> None:
    before = ExpertPlacement.even(ranks * each, ranks)
    load = data.draw(st.lists(st.integers(0, 20), min_size=ranks * each, max_size=ranks * each))
    after = plan(load, before)
    assert [after.owners.count(rank) for rank in range(ranks)] == [each] * ranks
    assert imbalance(load, after) <= imbalance(load, before) + 1e-12
    assert plan(load, after) == after


def test_rows_move_with_their_experts() -> None:
    old, new = ExpertPlacement.even(6, 3), ExpertPlacement((2, 0, 1, 1, 0, 2), 3)
    whole: list[Any] = [np.arange(6 * 5, dtype=np.float32).reshape(6, 5), np.arange(6, dtype=np.int64) + 100]

    def rank_main(comm: Communicator) -> None:
        own = [array[list(old.of_rank(comm.rank))] for array in whole]
        moved = move_experts(own, old, new, comm)
        for array, got in zip(whole, moved, strict=True):
            np.testing.assert_array_equal(got, array[list(new.of_rank(comm.rank))])
        back = move_experts(moved, new, old, comm)
        for mine, got in zip(own, back, strict=True):
            np.testing.assert_array_equal(got, mine)

    run(3, rank_main)
