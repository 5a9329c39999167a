"""Sums of squares, in float64 for every dtype. `kernels.norm` has the Python side."""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np

from commlib.kernels.host import intrinsics as ins
from commlib.kernels.host.compilation import kernel
from commlib.kernels.host.reduce import stored_type, widen

# There is one sum per position in a block, and these are added up at the end. A compiler may use vectors of any length
# for them without changing the order of additions, so the bits do not depend on the CPU.
_BLOCK = 512
_BLOCK_BYTES = 8 * _BLOCK


def squares(kind: str) -> Any:
    """Return the kernel for one dtype."""
    stored = stored_type(kind)

    @kernel(nogil=True)
    def write_squares(address: int, count: int, result: int) -> None:
        x = nb.carray(ins.as_pointer(address), count, stored)
        sums = nb.carray(ins.as_pointer(ins.stack(_BLOCK_BYTES)), _BLOCK, np.float64)
        sums[:] = 0.0
        for start in range(0, count, _BLOCK):
            block = x[start : start + _BLOCK]
            for i in range(len(block)):
                value = nb.float64(widen(kind, block[i]))
                sums[i] += value * value
        total = 0.0
        for i in range(_BLOCK):
            total += sums[i]
        nb.carray(ins.as_pointer(result), 1, np.float64)[0] = total

    return write_squares
