"""Oracle: compute a collective's correct result, in numpy, to the last bit."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import numpy as np

from commlib.dtypes import COMPLEX, DTYPES, NUMPY, OPERATIONS

REDUCIBLE = [
    (dtype, op)
    for dtype in DTYPES
    for op in OPERATIONS
    if not (dtype in COMPLEX and op in ("min", "max")) and (dtype, op) != ("bool", "mean")
]

_UFUNCS = {"sum": np.add, "mean": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}
_LOGICAL = {"sum": np.logical_or, "max": np.logical_or, "prod": np.logical_and, "min": np.logical_and}


def values(dtype: str, shape: int | tuple[int, ...], seed: int, low: int = -3, high: int = 3) -> Any:
    """Return small whole numbers: their sums and products are exact in every dtype, in any order."""
    random = np.random.default_rng(seed)
    if dtype == "bool":
        return np.array(random.integers(0, 2, shape), bool)
    if dtype.startswith("u"):
        low = 0
    numbers = random.integers(low, high + 1, shape)
    if dtype in COMPLEX:
        return np.array(numbers + 1j * random.integers(low, high + 1, shape), dtype)  # never a scalar
    return np.array(numbers, NUMPY[dtype])


def truncated_quotient(total: Any, divisor: int) -> Any:
    """Divide integers exactly, truncating toward zero (as Python ints: no overflow at the edges)."""
    flat = [abs(int(n)) // divisor * (1 if n >= 0 else -1) for n in np.ravel(total)]
    return np.array(flat, total.dtype).reshape(np.shape(total))


def combined(arrays: Sequence[Any], op: str) -> Any:
    """Combine arrays in order as commlib promises: half precision in float32, rounded once; means in 64 bits."""
    dtype = arrays[0].dtype
    if dtype.kind == "b":
        return np.asarray(reduce(_LOGICAL[op], arrays))
    wide = dtype
    if dtype in (NUMPY["float16"], NUMPY["bfloat16"]):
        wide = np.dtype(np.float32)
    elif op == "mean" and dtype.kind in "iu":
        wide = np.dtype(np.int64 if dtype.kind == "i" else np.uint64)
    with np.errstate(all="ignore"):
        total = reduce(_UFUNCS[op], [array.astype(wide) for array in arrays])
        if op == "mean" and dtype.kind in "iu":
            total = truncated_quotient(total, len(arrays))
        elif op == "mean" and dtype.kind == "c":  # numpy multiplies by the reciprocal, which rounds twice
            total = (total.real / total.real.dtype.type(len(arrays))) + 1j * (
                total.imag / total.imag.dtype.type(len(arrays))
            )
        elif op == "mean":
            total = total / wide.type(len(arrays))
        return np.asarray(total).astype(dtype)


def assert_same(actual: Any, expected: Any) -> None:
    """Assert that both arrays have the same shape, dtype and values (NaN equals NaN)."""
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    assert actual.dtype == expected.dtype, (actual.dtype, expected.dtype)
    if actual.dtype == NUMPY["bfloat16"]:  # exact; numpy's assertion knows only its own dtypes
        actual, expected = actual.astype(np.float32), expected.astype(np.float32)
    np.testing.assert_array_equal(actual, expected)
