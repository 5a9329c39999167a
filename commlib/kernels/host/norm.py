"""Sums of squares, in float64 for every dtype."""

from __future__ import annotations

from functools import cache
from typing import Any

import numba as nb
import numpy as np

from commlib.dtypes import FLOATS, Array, name_of
from commlib.errors import UsageError
from commlib.kernels.host.compilation import kernel
from commlib.kernels.host.reduce import widen

# There is one sum per position in a block, and these are added up at the end. A compiler may use vectors of any length
# for them without changing the order of additions, so the bits do not depend on the CPU.
_BLOCK = 512


@cache
def _compiled(kind: str) -> Any:
    @kernel(nogil=True)
    def squares(x: Any) -> float:
        sums = np.zeros(_BLOCK)
        for start in range(0, len(x), _BLOCK):
            block = x[start : start + _BLOCK]
            for i in range(len(block)):
                value = nb.float64(widen(kind, block[i]))
                sums[i] += value * value
        total = 0.0
        for i in range(_BLOCK):
            total += sums[i]
        return total

    return squares


def sum_of_squares(x: Array) -> float:
    """Return the sum of squares of a contiguous 1-D array of float16, bfloat16, float32 or float64.

    The same array gives the same bits on every CPU. Raises UsageError for other dtypes.
    """
    kind = name_of(x.dtype)
    if kind not in FLOATS:
        raise UsageError(f"sum_of_squares: expected an array of floats, got {kind}")
    return float(_compiled(kind)(x.view(np.uint16) if x.itemsize == 2 else x))
