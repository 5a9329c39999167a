"""Sparse payloads and residuals on CUDA match the host's, byte for byte."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commlib.kernels.cuda.table import CudaKernels
from commlib.kernels.host import sparse as host_sparse
from commlib.kernels.host.table import VALUES, HostKernels
from tests.cuda.launcher import HostLauncher

HOST = HostKernels()
WORKERS = [1, 7, 1000]
KINDS = list(VALUES)
FULL_NAN = np.array(0x7FFFFFFF, np.uint32).view(np.float32)[()]
SEPARATE, SAME, WITHOUT = "separate", "same", "without"  # residuals


def values_of(kind: str, count: int, seed: int = 0) -> Any:
    random = np.random.default_rng(seed)
    normal = random.standard_normal(count, np.float32)
    sparse_ones = normal * (random.random(count) < 0.002)
    with np.errstate(over="ignore"):
        kinds = {
            "normal": normal,
            "ties": random.integers(-2, 3, count),
            "equal": np.full(count, -3),
            "zeros": np.zeros(count),
            "negative zeros": np.where(normal > 1, normal, np.float32(-0.0)),
            "denormal": normal * np.float32(1e-40),
            "huge": np.clip(normal * np.float32(1e38), -3.4e38, 3.4e38),
            "near": (1 + np.abs(normal) * np.float32(1e-6)),  # only the last digit differs
            "rising": np.arange(count),
            "mostly zero": sparse_ones,
            "far apart": np.where(np.arange(count) % 70_001 == 70_000, normal, 0),
        }
    return kinds[kind].astype(np.float32)


def anywhere(nbytes: int, seed: int) -> Any:
    """Return memory for a payload at any address, and the array around it, to detect writes outside the payload."""
    memory = np.full(nbytes + 16, 171, np.uint8)
    start = seed % 9
    return memory, memory[start : start + nbytes]


def same(a: Any, b: Any) -> None:
    np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8))


def check_largest(launcher: HostLauncher, x: Any, before: Any, k: int, value: str, how: str, seed: int = 0) -> Any:
    results = []
    for kernels in (HOST, None):
        old = None if how == WITHOUT else before.copy()
        after = old if how != SEPARATE else np.full_like(x, 7)
        memory, payload = anywhere(host_sparse.max_bytes(len(x), k, VALUES[value]), seed)
        if kernels is None:
            used = CudaKernels(launcher).largest(x, old, after, k, value, payload)
        else:
            used = kernels.largest(x, old, after, k, value, payload)
        results.append((used, memory, after))
    (expected_used, expected, expected_after), (used, actual, after) = results
    assert used == expected_used
    same(actual, expected)
    if how != WITHOUT:
        same(after, expected_after)
    return actual[seed % 9 : seed % 9 + used]


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("how", [WITHOUT, SEPARATE, SAME])
@pytest.mark.parametrize(
    "kind",
    ["normal", "ties", "equal", "zeros", "negative zeros", "denormal", "huge", "near", "rising", "mostly zero"],
)
def test_top_k_matches_the_host(kind, how, workers):
    launcher = HostLauncher(workers)
    for seed, (count, k) in enumerate([(1, 1), (31, 5), (33, 33), (257, 20), (2049, 1), (5000, 50), (5000, 5000)]):
        before = values_of("zeros" if seed % 2 else kind, count, seed + 100)
        check_largest(launcher, values_of(kind, count, seed), before, k, KINDS[seed % 3], how, seed)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_top_k_of_any_numbers_matches_the_host(data):
    """Infinities and NaNs, too: their sums have the bits of the CPU here, as the host's do."""
    hard = [0, 0x80000000, 1, 0x80000001, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0x477FF000]
    bits = data.draw(st.lists(st.sampled_from(hard) | st.integers(0, 2**32 - 1), min_size=1, max_size=400))
    count = len(bits)
    x = np.array(bits, np.uint32).view(np.float32)
    before = np.zeros_like(x) if data.draw(st.booleans()) else values_of("normal", count, data.draw(st.integers(0, 9)))
    k, value = data.draw(st.integers(1, count)), data.draw(st.sampled_from(KINDS))
    how, workers = data.draw(st.sampled_from([WITHOUT, SEPARATE, SAME])), data.draw(st.sampled_from(WORKERS))
    check_largest(HostLauncher(workers), x, before, k, value, how, data.draw(st.integers(0, 8)))


@pytest.mark.parametrize("how", [WITHOUT, SEPARATE, SAME])
@pytest.mark.parametrize("k", [2, 40, 3000])
def test_nonfinite_elements_are_sent_alone(how, k):
    x, before = values_of("normal", 3000), values_of("huge", 3000, 1)
    x[::100], x[7::300], x[2999] = np.inf, np.nan, -np.inf
    x[1001], before[1001] = np.float32(3e38), np.float32(3e38)  # their sum overflows
    payload = check_largest(HostLauncher(), x, before, k, "float32", how)
    out = np.empty_like(x)
    assert CudaKernels(HostLauncher()).read_sparse(payload, "float32", out, False) == ""
    assert not np.isfinite(out[out != 0]).any() and np.count_nonzero(out) == min(k, 41 if how == WITHOUT else 42)


def test_top_k_of_nan_matches_the_host():
    x = np.full(700, FULL_NAN)
    for value in KINDS:
        check_largest(HostLauncher(), x, np.zeros_like(x), 9, value, WITHOUT)
        check_largest(HostLauncher(), x, np.ones_like(x), 700, value, SAME)


def test_a_sum_that_overflows_only_when_added_twice_is_finite():
    """2e38 + 1e38 is finite, though 2e38 + (2e38 + 1e38) is not: `after` alone does not show it."""
    x, before = np.full(300, 2e38, np.float32), np.full(300, 1e38, np.float32)
    check_largest(HostLauncher(), x, before, 5, "float32", SAME)
    x[250] = np.float32(3e38)  # and with one that is broken
    check_largest(HostLauncher(), x, before, 5, "float32", SAME)


@pytest.mark.parametrize("kind", ["normal", "mostly zero", "ties"])
def test_many_chunks_match_the_host(kind):
    """More than 64 chunks of bits, and of chosen elements, need sums of sums."""
    count = 150_000
    x = values_of(kind, count)
    for k in (1, 1500, 40_000):
        check_largest(HostLauncher(500), x, values_of("normal", count, 1), k, "bfloat16", SAME)
        check_largest(HostLauncher(500), x, None, k, "float16", WITHOUT)


@pytest.mark.parametrize("workers", WORKERS)
def test_gaps_longer_than_marks_match_the_host(workers):
    x = values_of("far apart", 600_000)  # gaps of 70,000 are shorter in words of two bytes
    x[-1] = 9
    payload = check_largest(HostLauncher(workers), x, None, 50, "float32", WITHOUT)
    assert payload[4] == 2
    x = values_of("rising", 40_000) * (np.arange(40_000) < 200)  # many short gaps and one of over a hundred marks
    x[-1] = 1
    payload = check_largest(HostLauncher(workers), x, None, 300, "float32", WITHOUT, 3)
    assert payload[4] == 1
    out = np.empty_like(x)
    assert CudaKernels(HostLauncher(workers)).read_sparse(payload, "float32", out, False) == ""
    same(out, x)


@pytest.mark.parametrize(
    "gap", [0, 1, 254, 255, 256, 509, 510, 511, 1019, 1020, 1275, 1530, 65534, 65535, 65536, 131070]
)
def test_gaps_next_to_marks_match_the_host(gap):
    x = np.zeros(gap + 40, np.float32)
    x[0] = -7
    x[gap + 1 :] = np.arange(1, 40)
    check_largest(HostLauncher(), x, None, 40, "float16", WITHOUT, gap)


def test_empty_arrays_are_accepted():
    empty = np.empty(0, np.float32)
    assert len(check_largest(HostLauncher(), empty, empty, 0, "float32", SAME)) == 8


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("value", KINDS)
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("kind", ["normal", "ties", "huge", "broken", "zeros"])
def test_accumulation_matches_the_host(kind, nesterov, value, workers):
    for count, k in ((1, 1), (300, 7), (4001, 40), (4001, 4001)):
        gradient = values_of("huge" if kind == "broken" else kind, count)
        if kind == "broken":
            gradient[::50], gradient[3::91] = np.nan, np.inf
        u, v = (values_of("huge" if kind == "broken" else "normal", count, seed) for seed in (1, 2))
        if kind == "zeros":
            u[:], v[:] = 0, 0
        results = []
        for on_host in (True, False):
            old = gradient.copy(), u.copy(), v.copy()
            after = np.full_like(u, 7), np.full_like(u, 8)
            memory, payload = anywhere(host_sparse.max_bytes(count, k, VALUES[value]), count)
            arguments = *old, *after, 0.3, 0.9, nesterov, k, value, payload
            used = HOST.accumulate(*arguments) if on_host else CudaKernels(HostLauncher(workers)).accumulate(*arguments)
            results.append((np.array([used]), memory, *old, *after))
        for expected, actual in zip(*results, strict=True):
            same(actual, expected)


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("how", [WITHOUT, SEPARATE, SAME])
def test_random_k_matches_the_host(how, workers):
    for seed, (count, k) in enumerate([(1, 1), (40, 40), (1000, 3), (5000, 700), (200_000, 2), (0, 0)]):
        x, before = values_of("normal", count, seed), values_of("normal", count, seed + 9)
        results = []
        for on_host in (True, False):
            old = None if how == WITHOUT else before.copy()
            after = old if how != SEPARATE else np.full_like(x, 7)
            memory, payload = anywhere(host_sparse.max_bytes(count, k, 0), seed)
            arguments = x, old, after, k, seed - 2, 1.5, payload
            used = HOST.random(*arguments) if on_host else CudaKernels(HostLauncher(workers)).random(*arguments)
            results.append((np.array([used]), memory, *([] if after is None else [after])))
        for expected, actual in zip(*results, strict=True):
            same(actual, expected)


@settings(max_examples=60, deadline=None)
@given(
    gaps=st.lists(st.integers(0, 300) | st.sampled_from([255, 510, 65534, 65535, 65536, 200_000]), max_size=60),
    value=st.sampled_from(KINDS), add=st.booleans(), workers=st.sampled_from(WORKERS), at=st.integers(0, 8),
    cut=st.sampled_from([0, 0, 0, 1, 2, 3, 9, 40]), fewer=st.sampled_from([0, 0, 1, 1000]), more=st.integers(0, 9),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_reading_matches_the_host(gaps, value, add, workers, at, cut, fewer, more, seed):
    """With any damage, and any bytes behind the payload; `out` is the same without damage."""
    indices = (np.cumsum(np.array(gaps, np.int64) + 1) - 1).astype(np.uint32)
    count = int(indices[-1]) + 1 if gaps else 0
    bits = np.random.default_rng(seed).integers(0, 2**32, len(gaps), np.uint32)
    bits[np.isnan(bits.view(np.float32))] = 0x7FC00000
    _, payload = anywhere(host_sparse.max_bytes(count, len(gaps), VALUES[value]) + more, at)
    used = host_sparse.write(indices, bits, len(gaps), VALUES[value], payload.ctypes.data)
    whole = payload[: max(used + more - cut, 0)]
    expected, actual = (np.full(max(count - fewer, 0), 2, np.float32) for _ in range(2))
    fault = HOST.read_sparse(whole, value, expected, add)
    assert CudaKernels(HostLauncher(workers)).read_sparse(whole, value, actual, add) == fault
    if not fault:
        same(actual, expected)


@settings(max_examples=60, deadline=None)
@given(data=st.binary(max_size=300), value=st.sampled_from(KINDS), width=st.sampled_from([1, 1, 2, 2, 0, 3]))
def test_damaged_payloads_are_read_as_on_the_host(data, value, width):
    payload = np.frombuffer(data, np.uint8).copy()
    payload[4:8] = np.array([width, VALUES[value]], np.uint16).view(np.uint8)[: len(payload[4:8])]
    payload[1:4] = 0  # valid counts
    expected, actual = np.zeros(5000, np.float32), np.zeros(5000, np.float32)
    fault = HOST.read_sparse(payload, value, expected, False)
    assert CudaKernels(HostLauncher()).read_sparse(payload, value, actual, False) == fault
    if not fault:
        same(actual, expected)


def test_a_payload_of_another_codec_is_refused():
    x = values_of("normal", 100)
    for value in KINDS:
        payload = np.zeros(host_sparse.max_bytes(100, 10, VALUES[value]), np.uint8)
        payload = payload[: CudaKernels(HostLauncher()).largest(x, None, None, 10, value, payload)]
        for other in KINDS:
            fault = CudaKernels(HostLauncher()).read_sparse(payload, other, np.empty(100, np.float32), False)
            assert fault == ("" if other == value else "other kind")


def misleading(factor: float) -> Any:
    """Return numbers in which the sampled tiles, every ninth tile of 256, differ from the other tiles."""
    count = 9 * 64 * 256
    x = values_of("normal", count)
    sampled = np.arange(count) // 256 % 9 == 0
    x[sampled] *= np.float32(factor)
    x[::1000] = -3  # equal ones
    if np.isnan(factor):
        x[5::1000] = np.inf  # their first digit is less
    return x


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("how", [WITHOUT, SEPARATE, SAME])
@pytest.mark.parametrize("factor", [100.0, 0.0, 1e-40, 3e38, np.nan])
def test_misleading_samples_match_the_host(factor, how, workers):
    with np.errstate(over="ignore"):
        x = misleading(factor)
    for k in (1, 700, 40_000):
        before = values_of("zeros", len(x))
        check_largest(HostLauncher(workers), x, before, k, "float32", how)


def test_launches_do_not_depend_on_the_data():
    """Only the length is waited for."""
    for kind in ("normal", "zeros", "equal"):
        launcher = HostLauncher()
        CudaKernels(launcher).largest(values_of(kind, 9000), None, None, 90, "float32", np.empty(900, np.uint8))
        assert len(launcher.launches) == 10
