"""Sparse payloads: some elements of an array as their number, their values, and the gaps between them.

    count (uint32) | bytes per gap, kind of the values (uint16 each) | values | gaps

A gap is the number of elements between a sent element and the previous sent one. It takes one or two bytes, whichever
makes the payload shorter. The largest number that fits, 255 or 65535, is a mark that means "skip as many, and
continue".
"""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np

from commlib.kernels.host import intrinsics as ins
from commlib.kernels.host.compilation import kernel

HEADER = 8  # bytes
FLOAT32, FLOAT16, BFLOAT16 = 0, 1, 2  # kinds of values

TOO_SHORT, OUTSIDE, OTHER_KIND = 1, 2, 3  # faults that `read` finds


@nb.njit(inline="always")  # type: ignore[untyped-decorator]
def value_bytes(kind: int) -> Any:
    """Return the length of a value."""
    return 4 if kind == FLOAT32 else 2


def max_bytes(count: int, k: int, kind: int) -> int:
    """Return the length of the longest payload of k of `count` elements."""
    return int(HEADER + k * value_bytes.py_func(kind) + min(k + count // 255, 2 * (k + count // 65535)))


@kernel(nogil=True)
def _half(kind: int, value: float) -> Any:
    """Round to the bits of float16 or bfloat16."""
    if kind == FLOAT16:
        return ins.float_to_half(value)
    if value != value:  # rounding might turn it into infinity
        return nb.uint16(0x7FC0)
    return ins.float_to_bfloat(value)


@kernel(nogil=True)
def _full(kind: int, bits: int) -> Any:
    return ins.half_to_float(bits) if kind == FLOAT16 else ins.bfloat_to_float(bits)


@kernel(nogil=True)
def loss(kind: int, bits: int) -> Any:
    """Return a value, given by its bits, minus its decoded value. Not finite if either is not."""
    value = ins.bits_float(bits)
    return value - value if kind == FLOAT32 else value - _full(kind, _half(kind, value))


@kernel(nogil=True)
def write(indices: Any, bits: Any, count: int, kind: int, payload: int) -> int:
    """Write the first `count` elements, given by ascending indices and bits, to the address `payload`.

    Returns the payload's length in bytes.
    """
    narrow: Any = count  # number of gaps and marks with one byte, and with two bytes
    wide: Any = count
    before: Any = -1
    for i in range(count):
        gap = np.int64(indices[i]) - before - 1
        narrow += gap // 255
        wide += gap // 65535
        before = np.int64(indices[i])
    width = 1 if narrow <= 2 * wide else 2
    nb.carray(ins.as_pointer(payload), 1, np.uint32)[0] = count
    kinds = nb.carray(ins.as_pointer(payload + 4), 2, np.uint16)
    kinds[0], kinds[1] = width, kind
    if kind == FLOAT32:
        ins.memcpy(payload + HEADER, bits.ctypes.data, 4 * count)
    else:
        halves = nb.carray(ins.as_pointer(payload + HEADER), count, np.uint16)
        for i in range(count):
            halves[i] = _half(kind, ins.bits_float(bits[i]))
    start = payload + HEADER + value_bytes(kind) * count
    units = narrow if width == 1 else wide
    bytes_ = nb.carray(ins.as_pointer(start), units, np.uint8)
    words = nb.carray(ins.as_pointer(start), units, np.uint16)
    mark = 255 if width == 1 else 65535
    at = 0
    before = -1
    for i in range(count):
        gap = np.int64(indices[i]) - before - 1
        before = np.int64(indices[i])
        while gap >= 0:
            unit = min(gap, mark)
            if width == 1:
                bytes_[at] = unit
            else:
                words[at] = unit
            at += 1
            gap = gap - mark if unit == mark else -1
    return start + width * units - payload


@kernel(nogil=True)
def read(payload: int, length: int, kind: int, output: int, count: int, add: bool) -> int:
    """Decode the payload of `length` bytes at an address into `count` float32, or add the values.

    Returns 0, or the fault.
    """
    out = nb.carray(ins.as_pointer(output), count, np.float32)
    if not add:
        for i in range(count):
            out[i] = nb.float32(0)
    if length < HEADER:
        return TOO_SHORT
    number = np.int64(nb.carray(ins.as_pointer(payload), 1, np.uint32)[0])
    kinds = nb.carray(ins.as_pointer(payload + 4), 2, np.uint16)
    width = np.int64(kinds[0])
    if kinds[1] != kind or (width != 1 and width != 2):
        return OTHER_KIND
    start = HEADER + value_bytes(kind) * number
    units = (length - start) // width
    full = nb.carray(ins.as_pointer(payload + HEADER), number, np.float32)
    halves = nb.carray(ins.as_pointer(payload + HEADER), number, np.uint16)
    bytes_ = nb.carray(ins.as_pointer(payload + start), units, np.uint8)
    words = nb.carray(ins.as_pointer(payload + start), units, np.uint16)
    mark = 255 if width == 1 else 65535
    at = 0
    index: Any = -1
    for i in range(number):
        index += 1
        gap: Any = mark
        while gap == mark:
            if at >= units:
                return TOO_SHORT
            gap = np.int64(bytes_[at]) if width == 1 else np.int64(words[at])
            index += gap
            at += 1
        if index >= count:
            return OUTSIDE
        value = full[i] if kind == FLOAT32 else _full(kind, halves[i])
        out[index] = out[index] + value if add else value
    return 0
