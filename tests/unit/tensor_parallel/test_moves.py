"""Moves: conjugates, lengths and the number of received bytes."""

from __future__ import annotations

import pytest

from commlib.errors import UsageError
from commlib.tensor_parallel import COPY, REDUCE, Redistribute, all_to_all, gather, reduce_scatter, scatter

EVERY = (COPY, REDUCE, scatter(1), gather(-1), gather(0, partial=True), reduce_scatter(2), all_to_all(1, 2))


@pytest.mark.parametrize("move", EVERY, ids=lambda move: move.name)
def test_the_conjugate_of_a_conjugate_is_the_move_itself(move: Redistribute) -> None:
    known = move.with_lengths((2, 1), (3, 3) if move.name == "all_to_all" else ())
    assert known.conjugate.conjugate == known
    assert move.conjugate.conjugate.name == move.name


def test_moves_have_conjugates() -> None:
    assert COPY.conjugate == REDUCE
    assert scatter(1).conjugate == gather(1)
    assert gather(1, partial=True).conjugate == reduce_scatter(1)
    assert all_to_all(1, 2).with_lengths((2, 1), (5, 4)).conjugate == all_to_all(2, 1).with_lengths((5, 4), (2, 1))


def test_received_bytes_are_computed() -> None:
    """For an array of 1200 bytes, on 4 ranks."""
    received = {move.name: move.received(1200, 4) for move in EVERY}
    share = 900.0
    assert received == {
        "copy": 0, "reduce": 2 * share, "scatter": 0, "gather": share, "gather_partial": share,
        "reduce_scatter": share, "all_to_all": share / 4,
    }  # fmt: skip
    assert all(move.received(1200, 1) == 0 for move in EVERY)


def test_invalid_moves_are_refused() -> None:
    with pytest.raises(UsageError, match="there is no move 'all_gather'"):
        Redistribute("all_gather")
    with pytest.raises(UsageError, match="dimension 1 cannot be both split and joined"):
        all_to_all(1, 1)
