"""Rows of floats: add them up by token, and multiply them by numbers.

Arithmetic is in float32 (in float64 for float64) and rounded once. Rows to add up are given by addresses, because most
are in the memory of other ranks.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numba as nb
import numpy as np

from commlib.dtypes import Array, name_of
from commlib.kernels.host import intrinsics as ins
from commlib.kernels.host.compilation import kernel
from commlib.kernels.host.dispatch_plan import next_of_others, prefetch_row
from commlib.kernels.host.reduce import narrow, widen

# There is one sum of products per position in a block: a compiler may use vectors of any length for them without
# changing the order of additions, so the bits do not depend on the CPU.
_BLOCK = 64


@cache
def _summing(kind: str) -> Any:
    wide = np.float64 if kind == "float64" else np.float32

    @kernel(nogil=True)
    def sum_rows(target: Any, starts: Any, slots: Any, addresses: Any, factors: Any) -> None:
        width = target.shape[1]
        total = np.empty(width, wide)
        for token in range(len(target)):
            row = target[token]
            first, last = starts[token], starts[token + 1]
            if last == first:
                row[:] = 0
                continue
            a = slots[first]
            one, by_one = nb.carray(ins.as_pointer(addresses[a]), width, target.dtype), factors[a]
            if last == first + 1:
                if by_one == 1:
                    ins.memcpy(row.ctypes.data, addresses[a], width * row.itemsize)
                else:
                    for j in range(width):
                        row[j] = narrow(kind, widen(kind, one[j]) * by_one)
                continue
            b = slots[first + 1]
            other, by_other = nb.carray(ins.as_pointer(addresses[b]), width, target.dtype), factors[b]
            if last == first + 2:
                for j in range(width):
                    row[j] = narrow(kind, widen(kind, one[j]) * by_one + widen(kind, other[j]) * by_other)
                continue
            for j in range(width):
                total[j] = widen(kind, one[j]) * by_one + widen(kind, other[j]) * by_other
            for i in range(first + 2, last):
                c = slots[i]
                more, by_more = nb.carray(ins.as_pointer(addresses[c]), width, target.dtype), factors[c]
                for j in range(width):
                    total[j] += widen(kind, more[j]) * by_more
            for j in range(width):
                row[j] = narrow(kind, total[j])

    return sum_rows


@cache
def _scaling(kind: str) -> Any:
    @kernel(nogil=True)
    def publish(block: Any, owners: Any, order: Any, rank: int, rows: Any, factors: Any, target: int) -> None:
        width = rows.shape[1]
        item_bytes = width * rows.itemsize
        at, place = 0, 0
        while place <= len(order):
            start, stop, at, place = next_of_others(block, owners, order, rank, at, place)
            for i in range(start, stop):
                prefetch_row(target + i * item_bytes, item_bytes)
                row, factor = rows[i], factors[i]
                out = nb.carray(ins.as_pointer(target + i * item_bytes), width, rows.dtype)
                for j in range(width):
                    out[j] = narrow(kind, widen(kind, row[j]) * factor)

    return publish


@cache
def _products(kind: str) -> Any:
    @kernel(nogil=True)
    def multiply_rows(rows: Any, others: Any, factors: Any, scaled: Any, products: Any) -> None:
        width = rows.shape[1]
        sums = np.empty(_BLOCK, np.float32)
        for i in range(len(rows)):
            row, other, out, factor = rows[i], others[i], scaled[i], factors[i]
            sums[:] = 0
            for start in range(0, width - width % _BLOCK, _BLOCK):
                a, b, c = row[start : start + _BLOCK], other[start : start + _BLOCK], out[start : start + _BLOCK]
                for j in range(_BLOCK):
                    value = widen(kind, a[j])
                    sums[j] += np.float32(value * widen(kind, b[j]))
                    c[j] = narrow(kind, value * factor)
            for half in (32, 16, 8):
                for j in range(half):
                    sums[j] += sums[half + j]
            total = np.float32(0)
            for j in range(8):
                total += sums[j]
            for j in range(width - width % _BLOCK, width):
                value = widen(kind, row[j])
                total += np.float32(value * widen(kind, other[j]))
                out[j] = narrow(kind, value * factor)
            products[i] = total

    return multiply_rows


def sum_rows(target: Array, starts: Array, slots: Array, addresses: Array, factors: Array) -> None:
    """Set each row t of `target` to the sum of the rows slots[starts[t] : starts[t + 1]], times their factors.

    A row without summands is 0. target: contiguous, 2-D, of floats. addresses: of all rows, int64. factors: float32;
    the other arrays are int32.
    """
    _summing(name_of(target.dtype))(_stored(target), starts, slots, addresses, factors)


def publish_scaled(
    block: Array, owners: Array, order: Array, rank: int, rows: Array, factors: Array, target: int
) -> None:
    """Write the rows that other ranks have sent, times their factors (float32), to their places behind an address.

    block: the block of a dispatch plan. rows: contiguous, 2-D, of floats.
    """
    _scaling(name_of(rows.dtype))(block, owners, order, rank, _stored(rows), factors, target)


def multiply_rows(rows: Array, others: Array, factors: Array, scaled: Array, products: Array) -> None:
    """Set `scaled` to `rows` times factors, and `products` (float32) to the dot products of `rows` and `others`.

    scaled: may be `rows`. All are contiguous, 2-D and of one float dtype; factors are float32.
    """
    kind = name_of(rows.dtype)
    _products(kind)(_stored(rows), _stored(others), factors, _stored(scaled), products)


def _stored(x: Array) -> Any:
    return x.view(np.uint16) if x.itemsize == 2 else x
