"""The norm of all gradients: what numpy says, and the same bits on every rank."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commlib.communicator import Communicator
from commlib.data_parallel import clip_factor, global_norm
from commlib.data_parallel.clip import _share
from commlib.errors import MismatchError
from commlib.kernels.norm import sum_of_squares
from tests import loopback


def norm_of(comm: Any, arrays: list[np.ndarray]) -> float:
    return global_norm(
        comm, [a.size for a in arrays], lambda index, start, stop: sum_of_squares(arrays[index][start:stop])
    )


@given(st.integers(1, 9), st.lists(st.integers(0, 20), max_size=6))
def test_shares_are_everything_once_and_equal(size: int, counts: list[int]) -> None:
    shares = [_share(rank, size, counts) for rank in range(size)]
    elements = [(index, i) for share in shares for index, start, stop in share for i in range(start, stop)]
    assert elements == [(index, i) for index, count in enumerate(counts) for i in range(count)]
    lengths = [sum(stop - start for _, start, stop in share) for share in shares]
    assert max(lengths) - min(lengths) <= 1


@settings(max_examples=10, deadline=None)
@given(st.integers(1, 4), st.lists(st.integers(0, 50), max_size=5))
def test_norm(size: int, counts: list[int]) -> None:
    """Integers whose squares add up exactly, in whatever order."""
    arrays = [(np.arange(count) % 9 - 4 + index).astype("float32") for index, count in enumerate(counts)]
    expected = math.sqrt(sum(float(np.square(a, dtype="float64").sum()) for a in arrays))
    assert loopback.run(size, lambda comm: norm_of(comm, arrays)) == [expected] * size


def test_the_same_bits_where_ranks_add_in_another_order() -> None:
    """Rank 1's squares come out a little larger than rank 0's, as on another CPU."""
    values = np.random.default_rng(0).standard_normal(1000)

    def rank(comm: Communicator) -> float:
        def squares(index: int, start: int, stop: int) -> float:
            return float(np.square(values[start:stop]).sum()) * (1 + comm.rank * 1e-15)

        return global_norm(comm, [1000], squares)

    norms = loopback.run(3, rank)
    assert len(set(norms)) == 1
    assert norms[0] == pytest.approx(float(np.linalg.norm(values)), rel=1e-13)


@pytest.mark.parametrize(("value", "expected"), [(math.inf, math.inf), (math.nan, math.nan), (-math.inf, math.inf)])
def test_one_element_that_is_not_finite(value: float, expected: float) -> None:
    arrays = [np.ones(7, "float32"), np.array([1, value], "float32"), np.ones(5, "float32")]
    norms = loopback.run(3, lambda comm: norm_of(comm, arrays))
    assert [str(norm) for norm in norms] == [str(expected)] * 3


@pytest.mark.parametrize("counts", [[3, 4], [4, 3, 1], [], [7]])
def test_ranks_with_other_gradients_are_told(counts: list[int]) -> None:
    def rank(comm: Communicator) -> None:
        with pytest.raises(MismatchError, match="different numbers"):
            norm_of(comm, [np.ones(count) for count in (counts if comm.rank == 1 else [4, 3])])
        assert norm_of(comm, [np.ones(4)]) == 2  # and go on

    loopback.run(3, rank)


def test_factor() -> None:
    assert clip_factor(0.5, 1.0) == 1
    assert clip_factor(0.0, 0.0) == 0
    assert clip_factor(4.0, 1.0) == pytest.approx(0.25, rel=1e-6)
    assert clip_factor(math.inf, 1.0) == 0
    assert math.isnan(clip_factor(math.nan, 1.0))
