"""Sums of squares, in float64 whatever the dtype."""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np

from commlib.dtypes import Array, name_of
from commlib.errors import UsageError
from commlib.kernels import intrinsics as ins
from commlib.kernels.cache import CACHED

# Only the order of additions is left to the compiler, which else could not use vectors; infinities and NaNs count.
_FREE_ORDER = {"reassoc"}


@nb.njit(cache=CACHED, nogil=True, fastmath=_FREE_ORDER)  # type: ignore[untyped-decorator]
def _squares_of_floats(x: Any) -> float:
    total = 0.0
    for i in range(len(x)):
        value = nb.float64(x[i])
        total += value * value
    return total


@nb.njit(cache=CACHED, nogil=True, fastmath=_FREE_ORDER)  # type: ignore[untyped-decorator]
def _squares_of_halves(x: Any) -> float:
    total = 0.0
    for i in range(len(x)):
        value = nb.float64(ins.half_to_float(x[i]))
        total += value * value
    return total


@nb.njit(cache=CACHED, nogil=True, fastmath=_FREE_ORDER)  # type: ignore[untyped-decorator]
def _squares_of_bfloats(x: Any) -> float:
    total = 0.0
    for i in range(len(x)):
        value = nb.float64(ins.bfloat_to_float(x[i]))
        total += value * value
    return total


def sum_of_squares(x: Array) -> float:
    """Return the sum of squares of a contiguous 1-D array of float16, bfloat16, float32 or float64.

    The same array gives the same bits on the same kind of CPU. Raises UsageError for other dtypes.
    """
    kind = name_of(x.dtype)
    if kind == "float16":
        return float(_squares_of_halves(x.view(np.uint16)))
    if kind == "bfloat16":
        return float(_squares_of_bfloats(x.view(np.uint16)))
    if kind not in ("float32", "float64"):
        raise UsageError(f"sum_of_squares: expected an array of floats, got {kind}")
    return float(_squares_of_floats(x))
