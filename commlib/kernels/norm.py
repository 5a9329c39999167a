"""Sums of squares, in float64 for every dtype."""

from __future__ import annotations

import numpy as np

from commlib.buffers.views import address_of
from commlib.dtypes import FLOATS, Array, name_of
from commlib.errors import UsageError
from commlib.kernels.machine_code import entry_point


def sum_of_squares(x: Array) -> float:
    """Return the sum of squares of a contiguous 1-D array of float16, bfloat16, float32 or float64.

    The same array gives the same bits on every CPU. Raises UsageError for other dtypes.
    """
    kind = name_of(x.dtype)
    if kind not in FLOATS:
        raise UsageError(f"sum_of_squares: expected an array of floats, got {kind}")
    result = np.empty(1)
    entry_point(f"norm.squares-{kind}", 3)(address_of(x), len(x), address_of(result))
    return float(result[0])
