"""Codecs on CUDA: the kernel sources, compiled for the host, must give the bits of the host's kernels."""

from __future__ import annotations

from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from commlib.dtypes import Array
from commlib.kernels.cuda.table import CudaKernels
from commlib.kernels.host.table import HostKernels
from tests.cuda.launcher import HostLauncher

HOST = HostKernels()
WORKERS = (1, 7, 10_000)
GREATEST = np.finfo(np.float32).max
LEAST = np.float32(2.0**-149)

# code, greatest code, by norm, at random, and the lengths of blocks: some that fit lanes, some that do not, some
# that several workers share.
QUANTISED = [
    ("int8", 127.0, False, False, (8, 256, 264, 2048, 4096)),
    ("int8", 127.0, False, True, (256, 24, 2056)),
    ("int8", 127.0, True, True, (40, 512, 1000, 2056, 10_000)),
    ("int8", 1.0, True, True, (512, 8)),
    ("int4", 7.0, False, False, (24, 256, 1024, 5000)),
    ("int4", 7.0, False, True, (256, 104)),
    ("int4", 7.0, True, False, (512, 3000)),
    ("e4m3", 448.0, False, False, (256, 1024, 72, 3000)),
    ("e4m3", 448.0, True, True, (256,)),
    ("e5m2", 57344.0, False, False, (256, 1024, 72)),
]
CASES = [(*how, block) for *how, blocks in QUANTISED for block in blocks]
SIGNED = (8, 40, 128, 256, 512, 1000, 1024, 2048, 2056, 5000, 9000)


def hard(count: int, block: int, first: int) -> Array:
    """Return float32 in which each block is of another hard kind, the first one of kind `first`."""
    random = np.random.default_rng(count + first)
    values = random.standard_normal(count).astype(np.float32)
    for number, start in enumerate(range(0, count, block)):
        part = values[start : start + block]
        kind = (first + number) % len(KINDS)
        part[:] = KINDS[kind](part, random)
    return values


def culprit(value: float):
    def write(x: Array, random: np.random.Generator) -> Array:
        x[random.integers(len(x))] = value
        return x

    return write


KINDS = (
    lambda x, random: x,
    lambda x, random: np.where(x < 0, np.float32(-0.0), np.float32(0)),
    lambda x, random: np.round(x * 100) * LEAST,
    lambda x, random: np.ldexp(x, random.integers(-40, 40, len(x))),
    lambda x, random: np.where(x < 0, -GREATEST, GREATEST),
    lambda x, random: np.where(random.random(len(x)) < 0.9, np.float32(0), x),
    lambda x, random: x * np.float32(2.0**-120),
    lambda x, random: x * np.float32(2.0**125),
    lambda x, random: np.round(x * 4) / np.float32(8),  # ties
    culprit(np.inf),
    culprit(-np.inf),
    culprit(np.nan),
)


SMALL = {"e4m3": (ml_dtypes.float8_e4m3fn, 127), "e5m2": (ml_dtypes.float8_e5m2, 124)}  # how many are finite


def between_codes(code: str, block: int) -> Array:
    """Return blocks with unit 1 that have all small floats, the middles between them, and those next to the middles."""
    kind, finite = SMALL[code]
    known = np.arange(finite, dtype=np.uint8).view(kind).astype(np.float32)
    middles = (known[:-1] + known[1:]) / np.float32(2)
    nexts = [np.nextafter(middles, np.float32(side)) for side in (0, np.inf)]
    sizes = np.concatenate([known, middles, *nexts])
    values = np.random.default_rng(1).permutation(np.concatenate([sizes, -sizes]))
    parts = np.split(values, range(block - 1, len(values), block - 1))
    return np.concatenate([np.append(known[-1], part) for part in parts])


def counts(block: int) -> list[int]:
    return [0, 1, 9, block - 1, block, block + 5, 3 * block, len(KINDS) * block + block // 2 + 3]


def check_equal(actual: Array, expected: Array) -> None:
    """Check that two arrays of float32 are the same, bit for bit; NaNs need not be."""
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(actual), nan)
    np.testing.assert_array_equal(actual[~nan].view(np.uint32), expected[~nan].view(np.uint32))


def check_encoding(kernel: str, x: Array, length: int, *how: Any) -> None:
    """Check CUDA's kernel(x, before, after, payload, *how) against the host's: without residual, with, and in place.

    Payloads and arrays have several offsets in memory, and nothing around a payload may be written.
    """
    for number, (residual, margin, shift) in enumerate(product(("none", "other", "same"), (16, 19), (0, 1))):
        mine = np.empty(len(x) + 5, np.float32)[shift : shift + len(x)]
        mine[:] = x
        pairs: list[Any]
        if residual == "none":
            pairs = [(None, None)] * 2
        else:
            before = np.concatenate([np.zeros(shift), np.float32(0.3) * x[::-1], [np.nan]]).astype(np.float32)
            pairs = [(before[shift:-1].copy(), np.zeros_like(x)), (before[shift:-1], np.ones(len(x), np.float32))]
            if residual == "same":
                pairs = [(old, old) for old, _ in pairs]
        payloads = [np.full(length + 2 * margin, 0xAA, np.uint8) for _ in pairs]
        getattr(HOST, kernel)(x, *pairs[0], payloads[0][margin:-margin], *how)
        cuda = CudaKernels(HostLauncher(WORKERS[number % 3]))
        getattr(cuda, kernel)(mine, *pairs[1], payloads[1][margin:-margin], *how)
        np.testing.assert_array_equal(payloads[1], payloads[0])
        if residual != "none":
            np.testing.assert_array_equal(pairs[1][1].view(np.uint32), pairs[0][1].view(np.uint32))
            np.testing.assert_array_equal(pairs[1][0].view(np.uint32), pairs[0][0].view(np.uint32))


def check_decoding(kernel: str, payload: Array, count: int, *how: Any) -> None:
    """Check CUDA's kernel(payload, out, *how, add) against the host's, as `check_encoding` does."""
    for number, (add, margin, shift) in enumerate(product((False, True), (0, 3), (0, 1))):
        start = np.linspace(-3, 5, count + 2, dtype=np.float32)
        expected, actual = start[shift : shift + count].copy(), start.copy()
        moved = np.concatenate([np.zeros(margin, np.uint8), payload])[margin:]
        getattr(HOST, kernel)(payload, expected, *how, add)
        cuda = CudaKernels(HostLauncher(WORKERS[number % 3]))
        getattr(cuda, kernel)(moved, actual[shift : shift + count], *how, add)
        check_equal(actual[shift : shift + count], expected)
        np.testing.assert_array_equal(actual[:shift], start[:shift])
        np.testing.assert_array_equal(actual[shift + count :], start[shift + count :])


@pytest.mark.parametrize("bfloat", [False, True])
@pytest.mark.parametrize("count", [0, 1, 3, 128, 1027])
def test_narrowing_and_widening_match_the_host(count, bfloat):
    values = hard(count, 1 + count // len(KINDS), 0)
    kind = np.dtype(ml_dtypes.bfloat16 if bfloat else np.float16)
    for x in (values, values * np.float32(2.0**-15), np.random.default_rng(1).permutation(values)):
        check_encoding("narrow", x, 2 * count, bfloat)
        payload = np.empty(2 * count, np.uint8)
        CudaKernels(HostLauncher()).narrow(x, None, None, payload, bfloat)
        with np.errstate(all="ignore"):
            np.testing.assert_array_equal(payload.view(kind).astype(np.float32), x.astype(kind).astype(np.float32))
        check_decoding("widen", payload, count, bfloat)


@pytest.mark.parametrize("bfloat", [False, True])
def test_every_half_is_widened_and_narrowed_back(bfloat):
    halves = np.arange(1 << 16, dtype=np.uint16)
    actual, expected = np.empty((2, len(halves)), np.float32)
    CudaKernels(HostLauncher()).widen(halves.view(np.uint8), actual, bfloat, False)
    HOST.widen(halves.view(np.uint8), expected, bfloat, False)
    np.testing.assert_array_equal(actual.view(np.uint32), expected.view(np.uint32))
    narrowed, wanted = np.empty((2, 2 * len(halves)), np.uint8)
    CudaKernels(HostLauncher()).narrow(actual, None, None, narrowed, bfloat)
    HOST.narrow(expected, None, None, wanted, bfloat)
    np.testing.assert_array_equal(narrowed, wanted)


@pytest.mark.parametrize("bfloat", [False, True])
def test_nan_stays_the_same_nan(bfloat):
    x = np.array([0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFC12345, 0x7F812345, 0x7FC00000], np.uint32).view(np.float32)
    actual, expected = np.zeros((2, 2 * len(x)), np.uint8)
    CudaKernels(HostLauncher()).narrow(x, None, None, actual, bfloat)
    HOST.narrow(x, None, None, expected, bfloat)
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize(("code", "top", "by_norm", "at_random", "block"), CASES)
def test_quantising_and_restoring_match_the_host(code, top, by_norm, at_random, block):
    for number, count in enumerate(counts(block)):
        seed = (0, -1, 2**63 - 1, 12345)[number % 4]
        how = block, code, top, by_norm, at_random, seed
        x = hard(count, block, number)
        length = 4 * -(-count // block) + (-(-count // 2) if code == "int4" else count)
        check_encoding("quantise", x, length, *how)
        payload = np.empty(length, np.uint8)
        HOST.quantise(x, None, None, payload, *how)
        check_decoding("restore", payload, count, block, code)


@pytest.mark.parametrize(("code", "block"), list(product(("e4m3", "e5m2"), (256, 40))))
def test_small_floats_are_rounded_to_nearest_even(code, block):
    x, kind = between_codes(code, block), SMALL[code][0]
    payload, blocks = np.empty(4 * -(-len(x) // block) + len(x), np.uint8), -(-len(x) // block)
    CudaKernels(HostLauncher()).quantise(x, None, None, payload, block, code, float(x[0]), False, False, 0)
    np.testing.assert_array_equal(payload[: 4 * blocks].view(np.float32), 1)
    np.testing.assert_array_equal(payload[4 * blocks :], x.astype(kind).view(np.uint8))


@pytest.mark.parametrize(("code", "block"), list(product(("int8", "int4", "e4m3", "e5m2"), (512, 520))))
def test_every_code_is_restored(code, block):
    count = 4096
    bytes_of_codes = count // 2 if code == "int4" else count
    units = np.array([1, 2.0**-120, 3e38, np.nan, 0, 0.7, 1, 1][: -(-count // block)], np.float32)
    payload = np.concatenate([units.view(np.uint8), np.arange(bytes_of_codes).astype(np.uint8)])
    check_decoding("restore", payload, count, block, code)


@pytest.mark.parametrize("block", SIGNED)
def test_signs_match_the_host(block):
    for number, count in enumerate(counts(block)):
        x = hard(count, block, number)
        length = 4 * -(-count // block) + -(-count // 8)
        check_encoding("signs", x, length, block)
        payload = np.empty(length, np.uint8)
        HOST.signs(x, None, None, payload, block)
        check_decoding("unsign", payload, count, block)


def test_the_longest_blocks_match_the_host():
    """Blocks of 2^20 elements, and of one element less, are summed by halves as on the host."""
    block = 1 << 20
    for count in (block, block - 1):
        x = hard(count, count // 5, 0)[: count // 5 * 5]  # without infinities
        payloads = np.zeros((2, 4 + len(x)), np.uint8)
        for norm in (False, True):
            HOST.quantise(x, None, None, payloads[0], block, "int8", 127.0, norm, True, 3)
            CudaKernels(HostLauncher()).quantise(x, None, None, payloads[1], block, "int8", 127.0, norm, True, 3)
            np.testing.assert_array_equal(*payloads)
        HOST.signs(x, None, None, payloads[0], block)
        CudaKernels(HostLauncher()).signs(x, None, None, payloads[1], block)
        np.testing.assert_array_equal(*payloads)


@pytest.mark.parametrize("block", [256, 24])
def test_random_rounding_never_exceeds_the_greatest_code(block):
    """Where rounding makes the greatest value a little more than 127 units, one in 2^17 would become -128 units."""
    values = np.linspace(1, 2, 1000, dtype=np.float32)
    (value,) = values[values * (np.float32(1) / (values / np.float32(127))) > 127][:1]
    x = np.full(1 << 20, value, np.float32)
    payload = np.empty(2 * len(x), np.uint8)
    CudaKernels(HostLauncher()).quantise(x, None, None, payload, block, "int8", 127.0, False, True, 0)
    start = 4 * -(-len(x) // block)
    assert (payload[start : start + len(x)] == 127).all()


@pytest.mark.parametrize(("block", "launches"), [(256, 1), (24, 1), (4096, 3)])
def test_blocks_take_few_launches(block, launches):
    launcher = HostLauncher()
    x, payload = np.ones(10_000, np.float32), np.empty(20_000, np.uint8)
    CudaKernels(launcher).quantise(x, None, None, payload, block, "int8", 127.0, False, False, 0)
    assert len(launcher.launches) == launches
