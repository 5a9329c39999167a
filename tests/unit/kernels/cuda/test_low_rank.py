"""Products with few vectors on CUDA: the host's bits where ranks must agree, elsewhere within the rounding of sums."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commlib.kernels.cuda.table import CudaKernels
from commlib.kernels.host.table import HostKernels
from tests.cuda.launcher import HostLauncher

HOST = HostKernels()
WORKERS = [1, 7, 1000]
ROUND = 2.0**-24  # the relative error of one rounding to float32
NOTHING = np.empty(0, np.float32)
SHAPES = st.tuples(st.integers(1, 40), st.sampled_from([1, 2, 31, 128, 129, 300]) | st.integers(1, 40))
RANKS = st.integers(1, 12) | st.sampled_from([31, 32, 33])


def normal(count: int, seed: int) -> Any:
    return np.random.default_rng(seed).standard_normal(count, np.float32)


def anywhere(x: Any) -> Any:
    """Return a copy at an address that is a multiple of 4 and not of 8."""
    memory = np.empty(len(x) + 3, np.float32)
    start = 1 if memory.ctypes.data % 8 == 0 else 2
    memory[start : start + len(x)] = x
    return memory[start : start + len(x)]


def same(a: Any, b: Any) -> None:
    np.testing.assert_array_equal(a.view(np.uint32), b.view(np.uint32))


def check_sums(result: Any, a: Any, b: Any) -> None:
    """Compare with a product in float64.

    A sum of n products in any order, rounded after each, is off by at most about n ROUND times the sum of magnitudes.
    """
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    bound = 1.01 * (a.shape[1] + 1) * ROUND * (np.abs(wide_a) @ np.abs(wide_b)) + 1e-44
    assert (np.abs(result - wide_a @ wide_b) <= bound).all()


@settings(max_examples=60, deadline=None)
@given(shape=SHAPES, rank=RANKS, feed=st.booleans(), workers=st.sampled_from(WORKERS), seed=st.integers(0, 99))
def test_projections_match_the_host(shape, rank, feed, workers, seed):
    rows, cols = shape
    matrix, right = anywhere(normal(rows * cols, seed)), anywhere(normal(rank * cols, seed + 1))
    before = normal(rows * cols, seed + 2) if feed else NOTHING
    total, left = matrix + before if feed else matrix.copy(), anywhere(np.full(rank * rows, np.nan))
    CudaKernels(HostLauncher(workers)).project(matrix, before, rows, cols, right, left, rank)
    same(matrix, total)
    check_sums(left.reshape(rank, rows), right.reshape(rank, cols), total.reshape(rows, cols).T)


@settings(max_examples=60, deadline=None)
@given(shape=SHAPES, rank=RANKS, workers=st.sampled_from(WORKERS), seed=st.integers(0, 99))
def test_projections_back_match_the_host(shape, rank, workers, seed):
    rows, cols = shape
    matrix, left = anywhere(normal(rows * cols, seed)), anywhere(normal(rank * rows, seed + 1))
    right = anywhere(np.full(rank * cols, np.nan))
    CudaKernels(HostLauncher(workers)).project_back(matrix, rows, cols, left, right, rank)
    check_sums(right.reshape(rank, cols), left.reshape(rank, rows), matrix.reshape(rows, cols))


@pytest.mark.parametrize("shape", [(2, 5000), (300, 3), (5000, 2), (700, 900)])
@pytest.mark.parametrize("rank", [1, 4, 9])
def test_products_of_small_integers_are_exact(shape, rank):
    """Over several parts, and as on the host: no sum exceeds 5000 * 14 * 7 < 2^24, so no order rounds."""
    rows, cols = shape
    random = np.random.default_rng(rank)
    matrix, before, right, left = (
        random.integers(-7, 8, count).astype(np.float32)
        for count in (rows * cols, rows * cols, rank * cols, rank * rows)
    )
    results = []
    for kernels in (HOST, None):
        total, p, q = matrix.copy(), np.full(rank * rows, np.nan, np.float32), np.full(rank * cols, np.nan, np.float32)
        if kernels is None:
            CudaKernels(HostLauncher()).project(total, before, rows, cols, right, p, rank)
            CudaKernels(HostLauncher()).project_back(total, rows, cols, left, q, rank)
        else:
            kernels.project(total, before, rows, cols, right, p, rank)
            kernels.project_back(total, rows, cols, left, q, rank)
        results.append((total, p, q))
    for expected, actual in zip(*results, strict=True):
        np.testing.assert_array_equal(actual, expected)


def test_sums_do_not_depend_on_the_device():
    rows, cols, rank = 300, 2000, 4
    matrix, right, left = normal(rows * cols, 0), normal(rank * cols, 1), normal(rank * rows, 2)
    actual = []
    for workers in WORKERS:
        p, q = np.empty(rank * rows, np.float32), np.empty(rank * cols, np.float32)
        CudaKernels(HostLauncher(workers)).project(matrix, NOTHING, rows, cols, right, p, rank)
        CudaKernels(HostLauncher(workers)).project_back(matrix, rows, cols, left, q, rank)
        actual.append(np.concatenate([p, q]))
    same(actual[0], actual[1])
    same(actual[0], actual[2])


def test_nonfinite_values_stay_in_their_row():
    matrix, right, left = normal(9 * 40, 0), normal(3 * 40, 1), np.empty(27, np.float32)
    matrix[40:43] = np.inf, 1e38, np.nan
    CudaKernels(HostLauncher()).project(matrix, NOTHING, 9, 40, right, left, 3)
    np.testing.assert_array_equal(np.isfinite(left.reshape(3, 9)), np.tile(np.arange(9) != 1, (3, 1)))


@settings(max_examples=80, deadline=None)
@given(
    shape=SHAPES, rank=RANKS, keep=st.booleans(), workers=st.sampled_from(WORKERS), seed=st.integers(0, 99),
    scale=st.sampled_from([1, 1e-22, 1e19]), zeros=st.booleans(),
)  # fmt: skip
def test_expand_has_the_bits_of_the_host(shape, rank, keep, workers, seed, scale, zeros):
    """Denormal products, those that overflow, and zeros of both signs, too."""
    rows, cols = shape
    counts = rows * cols, rank * rows, rank * cols, rank * cols
    matrix, left, right, own = (normal(count, seed + at) * np.float32(scale) for at, count in enumerate(counts))
    if zeros:
        for factor in (matrix, left, right, own):
            factor[np.abs(factor) < scale] *= np.float32(0)  # with its sign
    results = []
    for kernels in (HOST, None):
        expanded, after = anywhere(matrix), anywhere(np.full(rows * cols if keep else 0, np.nan))
        arguments = expanded, after, rows, cols, left, right, own, rank
        if kernels is None:
            CudaKernels(HostLauncher(workers)).expand(*arguments)
        else:
            kernels.expand(*arguments)
        results.append((expanded, after))
    for expected, actual in zip(*results, strict=True):
        broken = np.isnan(expected)
        np.testing.assert_array_equal(np.isnan(actual), broken)
        same(actual[~broken], expected[~broken])


def orthonormal(vectors: Any, rank: int, epsilon: float = 1e-6, workers: int = 7) -> tuple[int, Any, int, Any]:
    """Return the results of the host, and of CUDA."""
    expected, actual = vectors.copy(), anywhere(vectors)
    dropped_by_host = HOST.orthonormalise(expected, rank, epsilon)
    return dropped_by_host, expected, CudaKernels(HostLauncher(workers)).orthonormalise(actual, rank, epsilon), actual


def check_orthonormal(vectors: Any, rank: int, epsilon: float = 1e-6, workers: int = 7) -> int:
    """Compare with the host: one rounding to float32 hides the order of sums in float64, but may go to
    the other neighbour. No number is larger than 1."""
    dropped_by_host, expected, dropped, actual = orthonormal(vectors, rank, epsilon, workers)
    assert dropped == dropped_by_host
    assert (np.abs(actual - expected) <= 2 * ROUND).all()
    np.testing.assert_array_equal(actual.reshape(rank, -1).any(axis=1), expected.reshape(rank, -1).any(axis=1))
    return dropped


@settings(max_examples=60, deadline=None)
@given(
    rank=st.integers(1, 33), extra=st.integers(0, 300) | st.integers(2000, 4000),
    exponent=st.integers(-120, 110), seed=st.integers(0, 99), workers=st.sampled_from(WORKERS),
)  # fmt: skip
def test_orthonormal_vectors_match_the_host(rank, extra, exponent, seed, workers):
    vectors = np.random.default_rng(seed).integers(-500, 501, (rank, rank + extra)).astype(np.float32)
    vectors[:, :rank] += 20_000 * np.eye(rank, dtype=np.float32)  # far from dependent, so errors do not grow
    assert check_orthonormal(np.ldexp(vectors, exponent).reshape(-1), rank, workers=workers) == 0


def test_nearly_dependent_vectors_are_dropped():
    first, second = normal(500, 0).astype(np.float64), normal(500, 1).astype(np.float64)
    vectors = np.stack([first, first + 1e-3 * second, 3 * first, second]).astype(np.float32)
    _, _, dropped, actual = orthonormal(vectors.reshape(-1), 4)
    assert dropped == 2 or dropped == 1  # the last is the difference of the first two, but for roundings of 1e-7 / 1e-3
    orthogonal = actual.reshape(4, -1)[[0, 1]].astype(np.float64)
    # Each number was rounded once: products of two vectors of length 1 are off by 2 ROUND, and a bit.
    np.testing.assert_allclose(orthogonal @ orthogonal.T, np.eye(2), atol=2.1 * ROUND)


def test_a_small_rest_is_orthogonalised_twice():
    """One pass would leave errors of 2^-53 in a rest of 1e-12: products of 1e-4."""
    vectors = np.zeros((4, 11), np.float32)
    vectors[:, :3] = np.outer([3, 5, 7, 11], [1, 2, 3])
    vectors[:, 3:] = 1e-12 * np.random.default_rng(0).standard_normal((4, 8))
    _, _, dropped, actual = orthonormal(vectors.reshape(-1), 4, 1e-15)
    orthogonal = actual.reshape(4, 11).astype(np.float64)
    assert dropped == 0
    np.testing.assert_allclose(orthogonal @ orthogonal.T, np.eye(4), atol=2.1 * ROUND)


def test_zeros_and_dependent_vectors_are_dropped():
    vectors = np.array([[3, 4, 0], [6, 8, 0], [0, 0, 0], [1, 0, 0]], np.float32).reshape(-1)
    assert check_orthonormal(vectors, 4) == 2
    assert check_orthonormal(np.zeros(12, np.float32), 3) == 3
    assert check_orthonormal(np.zeros(12, np.float32), 3, 0.0) == 3
    assert check_orthonormal(np.array([-2], np.float32), 1) == 0
    _, expected, _, actual = orthonormal(np.array([4, -0.0, 0, -3], np.float32), 1)
    same(actual, expected)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("at", [0, 5, 29])
def test_nonfinite_vectors_are_not_changed(bad, at):
    vectors = normal(30, 0)
    vectors[at] = bad
    dropped_by_host, _, dropped, actual = orthonormal(vectors, 3)
    assert dropped_by_host == dropped == -1
    same(actual, vectors)
    vectors = np.full(30, 3e38, np.float32)  # their squares overflow float32
    vectors[:15] *= -1
    assert check_orthonormal(vectors, 2) == 1
