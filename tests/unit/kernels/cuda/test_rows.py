"""Rows on CUDA: gathered, added up and multiplied as on the host, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from commlib.dtypes import FLOATS, NUMPY
from commlib.kernels.cuda.table import CudaKernels
from commlib.kernels.host.table import HostKernels
from tests.cuda.hard import assert_same_bits, shifted, values
from tests.cuda.launcher import HostLauncher

HOST = HostKernels()
WIDTHS = (1, 7, 63, 64, 65, 200, 320)
HERE, THERE = 5, 6
"""Rows of each array."""


def places(count: int) -> Any:
    return np.random.default_rng(count).integers(-HERE, THERE, count).astype(np.int32)


def given(dtype: str, width: int, shift: int) -> Any:
    """Return rows here and there, and factors of those here; the arrays begin `shift` elements aside."""
    here, there = shifted(values(dtype, HERE * width, 1), shift), shifted(values(dtype, THERE * width, 2), shift)
    factors = values("float32", HERE, 3)
    factors[0] = 1
    return here, there, factors


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("workers", [1, 10_000])
def test_gathered_rows_match_the_host(dtype, workers):
    for width in WIDTHS:
        for shift in (0, 1):
            here, there, factors = given(dtype, width, shift)
            for by in (None, factors):
                actual, expected = (np.zeros(9 * width, NUMPY[dtype]) for _ in range(2))
                CudaKernels(HostLauncher(workers)).take_rows(here, there, by, places(9), width, actual)
                HOST.take_rows(here, there, by, places(9), width, expected)
                assert_same_bits(actual, expected)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("workers", [1, 10_000])
def test_sums_of_rows_match_the_host(dtype, workers):
    """Of no rows, one, two, and more."""
    starts = np.cumsum([0, 0, 1, 2, 3, 1, 0, 8]).astype(np.int32)
    where = places(int(starts[-1]))
    for width in WIDTHS:
        for shift in (0, 1):
            here, there, factors = given(dtype, width, shift)
            for by in (None, factors):
                actual, expected = (np.ones((len(starts) - 1) * width, NUMPY[dtype]) for _ in range(2))
                CudaKernels(HostLauncher(workers)).sum_rows(here, there, by, starts, where, width, actual)
                HOST.sum_rows(here, there, by, starts, where, width, expected)
                assert_same_bits(actual, expected)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("workers", [1, 10_000])
@pytest.mark.parametrize("in_place", [False, True])
def test_products_of_rows_match_the_host(dtype, workers, in_place):
    for width in WIDTHS:
        results = []
        for multiply in (HOST.multiply_rows, lambda *given: CudaKernels(HostLauncher(workers)).multiply_rows(*given)):
            one, other = values(dtype, 5 * width, 1), values(dtype, 5 * width, 2)
            scaled, products = one if in_place else np.zeros_like(one), np.zeros(5, np.float32)
            multiply(one, other, values("float32", 5, 3), width, scaled, products)
            results.append((one, scaled, products))
        for actual, expected in zip(results[1], results[0], strict=True):
            assert_same_bits(actual, expected)


def test_products_of_ordinary_numbers_match_the_host():
    """Hard ones are infinite or NaN for the most part once they are added up."""
    draw = np.random.default_rng(0)
    for dtype in FLOATS:
        one, other = (draw.standard_normal(5 * 321).astype(NUMPY[dtype]) for _ in range(2))
        by, actual, expected = draw.random(5).astype(np.float32), np.zeros(5, np.float32), np.zeros(5, np.float32)
        CudaKernels(HostLauncher()).multiply_rows(one, other, by, 321, one.copy(), actual)
        HOST.multiply_rows(one, other, by, 321, one.copy(), expected)
        assert np.isfinite(expected).all()
        assert_same_bits(actual, expected)


def test_empty_arrays_are_accepted():
    """There may be none, and neither array then."""
    nothing, nowhere = np.empty(0, np.float32), np.empty(0, np.int32)
    CudaKernels(HostLauncher()).take_rows(None, None, None, nowhere, 3, nothing)
    CudaKernels(HostLauncher()).sum_rows(None, None, None, np.zeros(1, np.int32), nowhere, 3, nothing)
    CudaKernels(HostLauncher()).multiply_rows(nothing, nothing, nothing, 3, nothing, nothing)
    sums = np.ones(6, np.float32)
    CudaKernels(HostLauncher()).sum_rows(None, None, None, np.zeros(3, np.int32), nowhere, 3, sums)
    assert not sums.any()
