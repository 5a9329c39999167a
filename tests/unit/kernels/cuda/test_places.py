"""Random places on CUDA: drawn, taken from and written to as the host does, bit for bit."""

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
WORKERS = st.sampled_from([1, 7, 10_000])
SEEDS = st.integers(-(2**63), 2**63 - 1)


def same_bits(actual, expected):
    np.testing.assert_array_equal(actual.view(np.uint32), expected.view(np.uint32))


@settings(deadline=None, max_examples=300)
@given(data=st.data(), count=st.integers(0, 3000) | st.sampled_from([2**20, 2**31 - 1, 2**32]), seed=SEEDS)
def test_drawn_places_match_the_host(data, count, seed):
    k = data.draw(st.integers(0, min(count, 2000)) | st.just(min(count, 2000)))
    actual, expected = np.empty((2, k), np.uint32)
    CudaKernels(HostLauncher(data.draw(WORKERS))).draw(count, seed, actual)
    HOST.draw(count, seed, expected)
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize(("count", "k"), [(1, 1), (2, 1), (3, 3), (7, 2), (10, 9)])
def test_every_rotation_of_few_elements(count, k):
    for seed in range(200):
        actual, expected = np.empty((2, k), np.uint32)
        CudaKernels(HostLauncher()).draw(count, seed, actual)
        HOST.draw(count, seed, expected)
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("workers", [1, 7, 10_000])
@pytest.mark.parametrize("culprit", [None, np.inf, -np.inf, np.nan, 3.4e38])
@pytest.mark.parametrize("residual", ["none", "other", "same"])
@pytest.mark.parametrize("count", [1, 6, 5000])
@pytest.mark.parametrize("shift", [0, 1])
def test_taken_values_match_the_host(workers, culprit, residual, count, shift):
    random = np.random.default_rng(count)
    values = np.ldexp(random.standard_normal(count + 1), random.integers(-150, 100, count + 1)).astype(np.float32)
    x = values[shift : shift + count]
    if culprit is not None:
        x[random.integers(count)] = culprit
    before = np.float32(0.3) * x[::-1]
    if culprit == np.float32(3.4e38):
        before[:] = x  # the sum overflows
    chosen = np.empty(-(-count // 3), np.uint32)
    HOST.draw(count, 5, chosen)
    results = []
    for kernels in (HOST.take, lambda *arguments: CudaKernels(HostLauncher(workers)).take(*arguments)):
        old = before.copy()
        new = old if residual == "same" else np.zeros_like(old)
        payload = np.zeros(len(chosen), np.float32)
        pair: Any = (None, None) if residual == "none" else (old, new)
        kernels(x, pair[0], pair[1], chosen, 1 if count == 6 else count / len(chosen), payload)
        results.append((payload, old, new))
    for actual, expected in zip(results[1], results[0], strict=True):
        same_bits(actual, expected)


def test_taking_from_nothing_writes_nothing():
    nothing, nowhere = np.empty(0, np.float32), np.empty(0, np.uint32)
    CudaKernels(HostLauncher()).take(nothing, nothing, nothing.copy(), nowhere, 1.0, nothing.copy())


@pytest.mark.parametrize("workers", [1, 7, 10_000])
def test_placed_values_match_the_host(workers):
    random = np.random.default_rng(0)
    chosen = random.permutation(1000)[:300].astype(np.uint32)
    values = random.standard_normal(300).astype(np.float32)
    values[:4] = np.nan, np.inf, -0.0, 2.0**-149
    actual = np.ones(1000, np.float32)
    expected = actual.copy()
    CudaKernels(HostLauncher(workers)).place(values, chosen, actual)
    HOST.place(values, chosen, expected)
    same_bits(actual, expected)
    CudaKernels(HostLauncher(workers)).place(values[:0], chosen[:0], actual)
    same_bits(actual, expected)
