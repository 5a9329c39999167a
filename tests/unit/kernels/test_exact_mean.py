"""The mean of 64-bit integers is exact, whatever their sum: it wrapped around, to -1 for two of the largest numbers."""

from __future__ import annotations

import numpy as np
import pytest

from commlib.execution.accumulation import Accumulation
from commlib.execution.reduce_function import ReduceFunction

SIZES = [1, 2, 3, 7]


def truncated(values: list[int]) -> int:
    """Return the mean, by Python's own integers."""
    total, size = sum(values), len(values)
    return total // size if total >= 0 else -(-total // size)


def operands(dtype: str, size: int, count: int = 3000) -> np.ndarray:
    """Return numbers for so many ranks: extreme ones and random ones."""
    limits, random = np.iinfo(dtype), np.random.default_rng(size)
    x = random.integers(limits.min, limits.max, (size, count), dtype, endpoint=True)
    edges = [limits.max, limits.min, limits.max - 1, limits.min + 1, 0, 1, limits.max // 2, 1 << 32, (1 << 32) - 1]
    if limits.min < 0:
        edges += [-1, -(1 << 32), -(1 << 32) - 1, limits.min // 2]
    x[:, : len(edges)] = edges
    x[:, len(edges) : 200] = random.choice(np.array(edges, dtype), (size, 200 - len(edges)))
    return x


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", ["int64", "uint64"])
@pytest.mark.parametrize("in_place", [False, True])
def test_means_of_all_operands_are_exact(dtype, size, in_place):
    x = operands(dtype, size)
    expected = [truncated(column) for column in x.T.tolist()]
    target = x[0] if in_place else np.empty_like(x[0])
    ReduceFunction.of(dtype, "mean", size).combine(list(x), target)
    assert target.tolist() == expected


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", ["int64", "uint64"])
def test_means_by_partial_sums_are_exact(dtype, size):
    x = operands(dtype, size)
    partial = [Accumulation(row, "mean", size) for row in x]
    first = partial[0]
    for other in partial[1:]:
        first.reduce_op.combine([first.x, other.x], first.x)
    target = np.empty_like(x[0])
    first.finish(first.x, target)
    assert target.tolist() == [truncated(column) for column in x.T.tolist()]
