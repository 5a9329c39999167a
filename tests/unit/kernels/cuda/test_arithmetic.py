"""The small loops on CUDA are the host's, to the last bit; sums of squares in another order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from commlib.dtypes import DTYPES, FLOATS, INTEGERS, NUMPY
from commlib.errors import UsageError
from commlib.kernels.cuda.table import CudaKernels
from commlib.kernels.host.table import HostKernels
from tests.cuda.hard import assert_same_bits, shifted, values
from tests.cuda.launcher import HostLauncher

HOST = HostKernels()
WORKERS = [1, 7, 1000]
LENGTHS = (0, 1, 2, 15, 16, 17, 33, 700)

# Accumulators and codecs need floats of all kinds, and integers in 64 bits and back.
CASTS = [
    *((source, target) for source in FLOATS for target in FLOATS),
    *((one, other) for one in (*INTEGERS, "bool") for other in ("float32", "float64")),
    *((one, other) for one in ("float32", "float64") for other in (*INTEGERS, "bool")),
    *((one, other) for one in ("int8", "int32", "int64", "uint64", "bool") for other in ("float16", "bfloat16")),
    *((one, other) for one in ("float16", "bfloat16") for other in ("int16", "int64", "uint8", "bool")),
    *((one, other) for one in ("int8", "int16", "int32") for other in ("int64", "uint64")),
    *((one, other) for one in ("int64", "uint64") for other in ("uint8", "int16", "uint32", "bool")),
]


def convertible(source: str, target: str) -> Any:
    """Return numbers that C converts: in the range of a target of integers, and between two floats."""
    if source in FLOATS and target in INTEGERS:
        random, kind = np.random.default_rng(1), NUMPY[target]
        magnitudes = 2 ** random.uniform(-3, min(8 * kind.itemsize - 1, 15), 2000)
        signs = 1 if target.startswith("u") else random.choice([-1, 1], 2000)
        return np.append(magnitudes * signs, [0, -0.0, -0.5, 0.99]).astype(NUMPY[source])
    numbers = values(source, 2000, 1)
    if source == "bool":
        return numbers.view(np.uint8).astype(bool)  # ml_dtypes reads a byte 2 as 2.0
    if source in ("float32", "float64"):
        tiny = 2.0**-22 if source == "float32" else 2.0**-40
        middles = 1 + (2 * np.arange(4096) + 1) * 2.0**-11
        middles = np.concatenate([middles, np.ldexp(middles, -20), 65520 * middles[:1], 1 + middles * 2.0**-8])
        near = np.outer(middles, [1, 1 + tiny, 1 - tiny]).ravel()
        numbers = np.concatenate([numbers, near.astype(NUMPY[source])])
    return numbers


@pytest.mark.parametrize("source, target", CASTS)
def test_casts_match_the_host(source: str, target: str) -> None:
    x = convertible(source, target)
    for i, length in enumerate((*LENGTHS, len(x))):
        for places in ((0, 0), (1, 1), (3, 1)):
            given, out = shifted(x[:length], places[0]), shifted(np.empty(length, NUMPY[target]), places[1])
            expected = np.empty_like(out)
            HOST.cast(given.copy(), expected)
            CudaKernels(HostLauncher(WORKERS[i % 3])).cast(given, out)
            assert_same_bits(out, expected)


def test_float64_is_rounded_to_float16_once() -> None:
    """By way of float32, the half below a tie would be lost first, and the tie then go to even."""
    x = np.array([1 + 2.0**-11 + 2.0**-40, 1 + 3 * 2.0**-11 - 2.0**-40])
    out = np.empty(2, np.float16)
    CudaKernels(HostLauncher()).cast(x, out)
    assert out.tolist() == [1 + 2.0**-10, 1 + 2.0**-10]


def test_no_nan_becomes_a_number() -> None:
    """With all bits set, as in the NaN of a GPU: rounding those as a number gives -0."""
    x = np.array([0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001], np.uint32).view(np.float32)
    for target in ("float16", "bfloat16"):
        out = np.zeros(3, NUMPY[target])
        CudaKernels(HostLauncher()).cast(x, out)
        assert np.isnan(out.astype(np.float32)).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [0, 1])
def test_fills_match_the_host(dtype: str, value: int) -> None:
    for i, length in enumerate(LENGTHS):
        x = values(dtype, length + 7, 0)
        expected = x.copy()
        HOST.fill(expected[3 : length + 3], value)
        CudaKernels(HostLauncher(WORKERS[i % 3])).fill(x[3 : length + 3], value)
        np.testing.assert_array_equal(x.view(np.uint8), expected.view(np.uint8))


def scaled_parts(x: Any, factor: float) -> tuple[Any, Any]:
    """Return a product's real and imaginary part, each operation rounded: numpy fuses some of them on some CPUs."""
    f, none = x.real.dtype.type(factor), x.real.dtype.type(0)
    return x.real * f - x.imag * none, x.real * none + x.imag * f


@pytest.mark.parametrize("dtype", DTYPES)
def test_scaling_matches_the_host(dtype: str) -> None:
    factors = (0.5, 3.0, -0.1, 1e-30, np.inf, np.nan) if NUMPY[dtype].kind in "fcV" else (0.5, 3.7)
    for factor in factors:
        for i, length in enumerate(LENGTHS):
            x = shifted(values(dtype, length, i), i % 4)
            expected = x.copy()
            with np.errstate(all="ignore"):
                if x.dtype.kind == "c":
                    expected.real, expected.imag = scaled_parts(x, factor)
                else:
                    HOST.scale(expected, factor)
            CudaKernels(HostLauncher(WORKERS[i % 3])).scale(x, factor)
            assert_same_bits(x, expected)


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("count, launches", [(0, 0), (1, 1), (7, 1), (200, 1), (450, 3)])
def test_arrays_are_packed_and_unpacked(workers: int, count: int, launches: int) -> None:
    """Arrays of any length and dtype, some empty, one long; nothing else is written."""
    random = np.random.default_rng(count)
    kinds = [("uint8", 1), ("float16", 1), ("float32", 3), ("float64", 0), ("complex128", 1)]
    arrays = []
    for k in range(count):
        dtype, place = kinds[k % 5]
        length = 20_000 if k == 3 else int(random.integers(1, 40))
        noise = random.integers(0, 256, length * NUMPY[dtype].itemsize, np.uint8)
        arrays.append(shifted(noise.view(NUMPY[dtype]), place))
    given = [*arrays[:2], np.empty(0, np.float32), *arrays[2:], np.empty(0, np.uint8)]
    length = sum(array.nbytes for array in given)
    packed, launcher = np.full(length + 2, 99, np.uint8), HostLauncher(workers)
    CudaKernels(launcher).pack(given, packed[1:-1])
    assert packed.tobytes() == b"c" + b"".join(array.tobytes() for array in given) + b"c"
    assert launcher.launches == ["pack"] * launches
    memory = [np.full(array.nbytes + 16, 99, np.uint8) for array in given]
    back = [m[8:-8].view(array.dtype) for m, array in zip(memory, given, strict=True)]
    CudaKernels(launcher).unpack(packed[1:-1], back)
    for m, array in zip(memory, given, strict=True):
        assert m.tobytes() == b"c" * 8 + array.tobytes() + b"c" * 8


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("length", [0, 1, 2047, 2048, 2049, 300_001, 5_000_003])
def test_sums_of_squares_match_the_host(dtype: str, length: int) -> None:
    """As on the host, but in another order. In any order, the error is at most one rounding per addition."""
    x = np.random.default_rng(length).standard_normal(length).astype(NUMPY[dtype])
    sums = {CudaKernels(HostLauncher(n)).squares(shifted(x, place)) for n in WORKERS for place in (0, 1, 3)}
    assert len(sums) == 1, "the order depends on where an array lies, or on the device"
    host, additions = length / 512 + 512, length / 2048 + 2 * 2048
    assert sums.pop() == pytest.approx(HOST.squares(x), rel=(host + additions) * 2.0**-53, abs=0)


@pytest.mark.parametrize("dtype", FLOATS)
def test_squares_of_exact_and_nonfinite_values_match(dtype: str) -> None:
    x = np.arange(-128, 5000 - 128) % 128
    array: Any = x.astype(NUMPY[dtype])
    assert CudaKernels(HostLauncher()).squares(array) == (x * x).sum()
    array[4999] = -np.inf
    assert CudaKernels(HostLauncher()).squares(array) == np.inf
    array[0] = np.nan
    assert np.isnan(CudaKernels(HostLauncher()).squares(array))


def test_squares_of_other_dtypes_are_refused() -> None:
    with pytest.raises(UsageError, match="floats, got int32"):
        CudaKernels(HostLauncher()).squares(np.ones(3, np.int32))


@pytest.mark.parametrize("workers", WORKERS)
def test_nonfinite_values_are_detected(workers: int) -> None:
    launcher = HostLauncher(workers)
    for length in LENGTHS:
        x = shifted(np.full(length, 3e38, np.float32), length % 4)
        assert CudaKernels(launcher).is_finite(x)
        for place in {0, length // 2, length - 1} if length else ():
            for bad in (np.inf, -np.inf, np.nan):
                x[place] = bad
                assert not CudaKernels(launcher).is_finite(x) and not HOST.is_finite(x)
            x[place] = -1e-45
    assert launcher.launches.count("fill") == len(launcher.launches) - launcher.launches.count("find_not_finite")


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
def test_momentum_matches_the_host(nesterov: bool, in_place: bool) -> None:
    for i, length in enumerate((*LENGTHS, 5000)):
        arrays = [shifted(values("float32", length, 3 * i + k), (i + k * (i % 3)) % 4) for k in range(3)]
        arrays[1][~np.isfinite(arrays[1])] = 2
        ours, hosts = ([x.copy() for x in arrays] for _ in range(2))
        for kernels, (gradient, u, after) in (
            (HOST.add_momentum, hosts),
            (lambda *args, n=WORKERS[i % 3]: CudaKernels(HostLauncher(n)).add_momentum(*args), ours),
        ):
            kernels(gradient, u, u if in_place else after, 0.3, 0.9, nesterov)
        for mine, expected in zip(ours, hosts, strict=True):
            assert_same_bits(mine, expected)
