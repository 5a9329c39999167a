"""The mean of 64-bit integers, whose sum may need more than 64 bits: numbers are added up in halves of 32 bits.

A number is 2^32 times its high half, which includes the sign, plus its low half. Sums of each half fit 64 bits for any
number of ranks. Partial sums travel as such pairs of int64, called "halves".
"""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np

from commlib.kernels.host import intrinsics as ins
from commlib.kernels.host.compilation import kernel

_BLOCK = 1024
_BLOCK_BYTES = 8 * _BLOCK
_LOW = (1 << 32) - 1


@nb.njit(inline="always")  # type: ignore[untyped-decorator]
def _mean(high: int, low: int, divisor: int, signed: int) -> int:
    """Return (high * 2^32 + low) / divisor, truncated toward zero, as 64 bits."""
    first = high // divisor  # rounds down
    rest = ((high - first * divisor) << 32) + low
    second = rest // divisor
    mean = (first << 32) + second
    return mean + 1 if signed and mean < 0 and second * divisor != rest else mean


def mean_function(dtype: str) -> Any:
    """Return the kernel of `reduce` for the mean of int64 or uint64."""
    signed = dtype == "int64"

    @kernel(nogil=True)
    def reduce(inputs: int, n_inputs: int, outputs: int, n_outputs: int, offset: int, count: int, divisor: int) -> None:
        sources = nb.carray(ins.as_pointer(inputs), n_inputs, np.int64)
        targets = nb.carray(ins.as_pointer(outputs), n_outputs, np.int64)
        highs = nb.carray(ins.as_pointer(ins.stack(_BLOCK_BYTES)), _BLOCK, np.int64)
        lows = nb.carray(ins.as_pointer(ins.stack(_BLOCK_BYTES)), _BLOCK, np.int64)
        for start in range(0, count, _BLOCK):
            length, here = min(_BLOCK, count - start), offset + 8 * start
            high, low = highs[:length], lows[:length]
            high[:] = 0
            low[:] = 0
            for k in range(n_inputs):
                x = nb.carray(ins.as_pointer(sources[k] + here), length, np.int64)
                for i in range(length):
                    high[i] += x[i] >> 32 if signed else (x[i] >> 32) & _LOW
                    low[i] += x[i] & _LOW
            result = nb.carray(ins.as_pointer(targets[0] + here), length, np.int64)
            for i in range(length):
                result[i] = _mean(high[i], low[i], divisor, signed)
            for k in range(1, n_outputs):
                ins.memcpy(targets[k] + here, targets[0] + here, 8 * length)

    return reduce


def sum_of_halves() -> Any:
    """Return the kernel of `reduce` for the sum of halves."""

    @kernel(nogil=True)
    def reduce(inputs: int, n_inputs: int, outputs: int, n_outputs: int, offset: int, count: int, divisor: int) -> None:
        sources = nb.carray(ins.as_pointer(inputs), n_inputs, np.int64)
        targets = nb.carray(ins.as_pointer(outputs), n_outputs, np.int64)
        totals = nb.carray(ins.as_pointer(ins.stack(_BLOCK_BYTES)), _BLOCK, np.int64)
        for start in range(0, 2 * count, _BLOCK):
            length, here = min(_BLOCK, 2 * count - start), offset + 8 * start
            total = totals[:length]
            total[:] = 0
            for k in range(n_inputs):
                x = nb.carray(ins.as_pointer(sources[k] + here), length, np.int64)
                for i in range(length):
                    total[i] += x[i]
            for k in range(n_outputs):
                result = nb.carray(ins.as_pointer(targets[k] + here), length, np.int64)
                for i in range(length):  # an assignment of the slice would allocate memory
                    result[i] = total[i]

    return reduce


@kernel(nogil=True)
def split_halves(numbers: int, halves: int, count: int, signed: int) -> None:
    """Write 64-bit integers at one address as halves to another address."""
    x, pairs = (
        nb.carray(ins.as_pointer(numbers), count, np.int64),
        nb.carray(ins.as_pointer(halves), 2 * count, np.int64),
    )
    for i in range(count):
        pairs[2 * i] = x[i] >> 32 if signed else (x[i] >> 32) & _LOW
        pairs[2 * i + 1] = x[i] & _LOW


@kernel(nogil=True)
def join_halves(halves: int, numbers: int, count: int, divisor: int, signed: int) -> None:
    """Write sums of halves, divided by `divisor`, as 64-bit integers."""
    pairs, x = (
        nb.carray(ins.as_pointer(halves), 2 * count, np.int64),
        nb.carray(ins.as_pointer(numbers), count, np.int64),
    )
    for i in range(count):
        x[i] = _mean(pairs[2 * i], pairs[2 * i + 1], divisor, signed)
