"""Hard values of each dtype, and a bitwise comparison of arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from commlib.dtypes import COMPLEX, FLOATS, INTEGERS, NUMPY, Array

_BITS = {2: np.uint16, 4: np.uint32, 8: np.uint64}
_SPECIAL = (0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0, 1e-40, -1e-45, 6e-8, 65504.0, 3e38, 1e308, 5e-324)


def values(dtype: str, count: int, seed: int) -> Any:
    """Return numbers of all magnitudes, ordinary ones, and those that need a rule: signed zeros, denormals, NaN."""
    random, kind = np.random.default_rng(seed), NUMPY[dtype]
    if dtype in COMPLEX:
        return values(f"float{4 * kind.itemsize}", 2 * count, seed).view(kind)
    array: Any = random.integers(0, 256, count * kind.itemsize, np.uint8).view(kind)
    choices = random.integers(0, 4, count)
    if dtype == "bool":
        array.view(np.uint8)[choices < 2] = 0  # the others are true, whatever the byte
    elif dtype in INTEGERS:
        array[choices == 0] = np.iinfo(kind).max
        array[choices == 1] = np.iinfo(kind).min
        array[choices == 2] %= 5
    else:
        with np.errstate(over="ignore"):
            array[choices < 2] = random.standard_normal(count).astype(kind)[choices < 2]
            array[choices == 2] = random.choice(_SPECIAL, count).astype(kind)[choices == 2]
    return array


def shifted(x: Array, by: int) -> Array:
    """Return a copy that begins `by` elements behind an address of 64 bytes."""
    memory = np.empty(x.nbytes + 64 + by * x.itemsize, np.uint8)
    start = -memory.ctypes.data % 64 + by * x.itemsize
    copy = memory[start : start + x.nbytes].view(x.dtype)
    copy.view(np.uint8)[:] = x.view(np.uint8)
    return copy


def assert_same_bits(actual: Array, expected: Array) -> None:
    """Assert that arrays are the same to the last bit, except that NaNs may differ, as they do between machines."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    if actual.dtype.kind == "c":
        part = np.dtype(f"f{actual.itemsize // 2}")
        actual, expected = actual.view(part), expected.view(part)
    if actual.dtype in [NUMPY[name] for name in FLOATS]:
        with np.errstate(invalid="ignore"):  # ml_dtypes' warnings
            nan, found = np.isnan(expected), np.isnan(actual)
        np.testing.assert_array_equal(found, nan)
        actual, expected = (x.view(_BITS[x.itemsize])[~nan] for x in (actual, expected))
    np.testing.assert_array_equal(actual.view(np.uint8), expected.view(np.uint8))
