"""Block passes: process one block of an array within the L1 cache, for the kernels that split arrays into blocks.

Each pass is a separate loop that LLVM vectorizes. Together the passes cost less than a single loop that it does not
vectorize. Sums have a fixed order, so their bits do not depend on the CPU.
"""

from __future__ import annotations

import math
from typing import Any

import numba as nb

from commlib.kernels.host import intrinsics as ins

INFINITY = nb.uint32(0x7F800000)
MAGNITUDE = nb.uint32(0x7FFFFFFF)
SIGN = nb.uint32(0x80000000)
LEAST_NORMAL = nb.float32(2.0**-126)
GREATEST = nb.float32((2.0 - 2.0**-23) * 2.0**127)


@nb.njit(nogil=True)  # type: ignore[untyped-decorator]
def add_to(target: Any, x: Any, y: Any) -> None:
    """Write x + y to target, which is a third array."""
    for i in range(len(target)):
        target[i] = x[i] + y[i]


@nb.njit(nogil=True)  # type: ignore[untyped-decorator]
def add(target: Any, x: Any) -> None:
    """Add x to target."""
    for i in range(len(target)):
        target[i] += x[i]


@nb.njit(nogil=True)  # type: ignore[untyped-decorator]
def copy(target: Any, x: Any) -> None:
    """Write x to target."""
    for i in range(len(target)):
        target[i] = x[i]


@nb.njit(nogil=True)  # type: ignore[untyped-decorator]
def greatest(x: Any) -> Any:
    """Return the bits of the greatest |x|. Bits compare like the numbers, with infinities and NaN last."""
    result = nb.uint32(0)
    for i in range(len(x)):
        bits = nb.uint32(ins.float_bits(x[i]) & MAGNITUDE)
        result = bits if bits > result else result
    return result


@nb.njit(nogil=True)  # type: ignore[untyped-decorator]
def sum_by_halves(x: Any) -> Any:
    """Return the sum of x, which is overwritten: the upper half is added to the lower half until one number is left."""
    n = len(x)
    while n > 1:
        half = (n + 1) // 2
        low, high = x[: n - half], x[half:n]
        for i in range(len(low)):
            low[i] += high[i]
        n = half
    return x[0]


@nb.njit(nogil=True)  # type: ignore[untyped-decorator]
def mean_magnitude(x: Any, scratch: Any) -> Any:
    """Return the mean of |x| for finite x. It cannot overflow. Scratch is as long as x."""
    share = nb.float32(1) / nb.float32(len(x))
    for i in range(len(x)):
        scratch[i] = abs(x[i]) * share
    return min(sum_by_halves(scratch), GREATEST)


@nb.njit(nogil=True)  # type: ignore[untyped-decorator]
def norm(x: Any, greatest_bits: int, scratch: Any) -> Any:
    """Return the Euclidean norm of finite x, at most the greatest float32. Scratch is as long as x.

    x is divided by the power of two below its greatest magnitude before it is squared: no square overflows, and no
    relevant square underflows.
    """
    exponent = min(max(greatest_bits >> nb.uint32(23), nb.uint32(1)), nb.uint32(253))
    power = ins.bits_float(nb.uint32(exponent << nb.uint32(23)))
    inverse = ins.bits_float(nb.uint32((nb.uint32(254) - exponent) << nb.uint32(23)))
    for i in range(len(x)):
        scratch[i] = (x[i] * inverse) * (x[i] * inverse)
    return min(power * math.sqrt(sum_by_halves(scratch)), GREATEST)
