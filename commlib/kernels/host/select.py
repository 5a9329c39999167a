"""Selection: find the largest elements of an array exactly, in one pass, with memory for a few times as many.

Candidates are collected in order of their index. When there is no space for more, all but the k largest so far are
removed, and from then on only elements larger than the k-th are collected. Nearly all elements therefore cost a
comparison of 64 at once. Magnitudes are compared as integers, which orders infinities and, above them, NaNs last.
"""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from commlib.kernels.host.compilation import kernel

MAGNITUDE = 0x7FFFFFFF  # all bits of a float32 except its sign
INFINITY = 0x7F800000  # magnitudes from here on are not finite

# Elements that are compared at once.
LANES = 64

_DIGIT_BITS = (11, 10, 10)  # of a magnitude, the highest first


@intrinsic
def _at_least(typingctx: Any, address: Any, threshold: Any) -> Any:
    """Return a mask of the LANES float32 at `address`: a bit is set if a magnitude is at least `threshold` (bits)."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vector = ir.VectorType(ir.IntType(32), LANES)
        bits = builder.load(builder.inttoptr(args[0], vector.as_pointer()), align=4)
        magnitudes = builder.and_(bits, ir.Constant(vector, [MAGNITUDE] * LANES))
        first = ir.Constant(ir.IntType(32), 0)
        one = builder.insert_element(ir.Constant(vector, ir.Undefined), args[1], first)
        all_lanes = builder.shuffle_vector(one, one, ir.Constant(vector, [0] * LANES))
        return builder.bitcast(builder.icmp_unsigned(">=", magnitudes, all_lanes), ir.IntType(LANES))

    return types.uint64(types.intp, types.uint32), codegen


@intrinsic
def _lowest(typingctx: Any, mask: Any) -> Any:
    """Return the index of the lowest set bit of a nonzero mask."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.uint64), codegen


@kernel(nogil=True)
def keep_largest(indices: Any, bits: Any, count: int, k: int) -> int:
    """Reduce `count` > k > 0 candidates to the k of largest magnitude, in order; among equals, the first ones.

    Returns the magnitude (its bits) of the smallest remaining one.
    """
    histogram = np.empty(1 << 11, np.int64)
    prefix, shift = 0, 31
    wanted: Any = k
    for width in _DIGIT_BITS:  # the k-th largest magnitude, digit by digit
        above, shift = shift, shift - width
        for digit in range(1 << width):
            histogram[digit] = 0
        for i in range(count):
            magnitude = np.int64(bits[i]) & MAGNITUDE
            if magnitude >> above == prefix:
                histogram[(magnitude >> shift) & ((1 << width) - 1)] += 1
        digit = (1 << width) - 1
        while histogram[digit] < wanted:
            wanted -= histogram[digit]
            digit -= 1
        prefix = (prefix << width) | digit
    length: Any = 0
    for i in range(count):
        magnitude = np.int64(bits[i]) & MAGNITUDE
        equal = magnitude == prefix and wanted > 0
        wanted -= equal
        indices[length] = indices[i]
        bits[length] = bits[i]
        length += magnitude > prefix or equal
    return prefix


@nb.njit(inline="always")  # type: ignore[untyped-decorator]
def room(count: int, k: int) -> Any:
    """Return the number of candidates that `collect` needs space for, to find the k largest of `count` elements."""
    return min(count, 2 * k + 256) + LANES


@kernel(nogil=True)
def collect(y: Any, base: int, k: int, indices: Any, bits: Any, count: int, threshold: int) -> Any:
    """Add candidates from the next elements, y, which begin at `base`, to `count` others; return (count, threshold)."""
    whole = len(y) - len(y) % LANES
    full = len(indices) - LANES
    raw = y.view(np.uint32)
    for start in range(0, len(y), LANES):
        if start < whole:
            mask = _at_least(y.ctypes.data + 4 * start, nb.uint32(threshold))
        else:
            mask = nb.uint64(0)
            for lane in range(len(y) - whole):
                if np.int64(raw[whole + lane]) & MAGNITUDE >= threshold:
                    mask |= nb.uint64(1) << nb.uint64(lane)
        while mask != nb.uint64(0):
            at = start + _lowest(mask)
            mask &= mask - nb.uint64(1)
            indices[count] = base + at
            bits[count] = raw[at]
            count += 1
        if count > full:
            threshold = keep_largest(indices, bits, count, k) + 1  # a later equal one is not chosen
            count = k
    return count, threshold


@kernel(nogil=True)
def finish(k: int, indices: Any, bits: Any, count: int) -> int:
    """Return the final number of candidates: at most k; if some are not finite, only these."""
    if count > k:
        keep_largest(indices, bits, count, k)
        count = k
    broken = 0
    for i in range(count):
        if np.int64(bits[i]) & MAGNITUDE >= INFINITY:
            indices[broken] = indices[i]
            bits[broken] = bits[i]
            broken += 1
    return broken if broken > 0 else count
