"""Sums of squares, in float64 whatever the dtype."""

from __future__ import annotations

from functools import cache
from typing import Any

import numba as nb
import numpy as np

from commlib.dtypes import FLOATS, Array, name_of
from commlib.errors import UsageError
from commlib.kernels.arithmetic import widen
from commlib.kernels.cache import CACHED

# Only the order of additions is left to the compiler, which else could not use vectors; infinities and NaNs count.
_FREE_ORDER = {"reassoc"}


@cache
def _compiled(kind: str) -> Any:
    @nb.njit(cache=CACHED, nogil=True, fastmath=_FREE_ORDER)  # type: ignore[untyped-decorator]
    def squares(x: Any) -> float:
        total = 0.0
        for i in range(len(x)):
            value = nb.float64(widen(kind, x[i]))
            total += value * value
        return total

    return squares


def sum_of_squares(x: Array) -> float:
    """Return the sum of squares of a contiguous 1-D array of float16, bfloat16, float32 or float64.

    The same array gives the same bits on the same kind of CPU. Raises UsageError for other dtypes.
    """
    kind = name_of(x.dtype)
    if kind not in FLOATS:
        raise UsageError(f"sum_of_squares: expected an array of floats, got {kind}")
    return float(_compiled(kind)(x.view(np.uint16) if x.itemsize == 2 else x))
