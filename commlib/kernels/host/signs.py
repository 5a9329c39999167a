"""Signs: one bit per element, and one magnitude per block of elements, its mean magnitude.

A payload has the magnitudes of all blocks (float32), then the sign bits, 1 for minus. Bit k of the bytes of a block has
the signs of its k-th eighth, so packing consists of shifts of full vectors. Two magnitudes have a special meaning:

    NaN   the block had an infinity or NaN; all elements decode to NaN, and the residual does not change
    0     the block is zero, or so small that the mean would be denormal (see `quantise`); all elements decode to 0
"""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np

from commlib.kernels.host import blocks
from commlib.kernels.host import intrinsics as ins
from commlib.kernels.host.compilation import kernel


@nb.njit(nogil=True)  # type: ignore[untyped-decorator]
def _write_signs(v: Any, signs: Any) -> None:
    signs[:] = 0
    for k in range(8):
        eighth = v[k * len(signs) : (k + 1) * len(signs)]
        for i in range(len(eighth)):
            negative = nb.uint32(ins.float_bits(eighth[i]) >> nb.uint32(31))
            signs[i] |= nb.uint8(negative << nb.uint32(k))


@nb.njit(nogil=True)  # type: ignore[untyped-decorator]
def _read_signs(signs: Any, magnitude: float, target: Any) -> None:
    bits = ins.float_bits(magnitude)
    for k in range(8):
        eighth = target[k * len(signs) : (k + 1) * len(signs)]
        for i in range(len(eighth)):
            negative = nb.uint32(nb.uint32(signs[i]) >> nb.uint32(k))
            eighth[i] = ins.bits_float(nb.uint32(bits ^ nb.uint32(negative << nb.uint32(31))))


@nb.njit(nogil=True)  # type: ignore[untyped-decorator]
def _subtract(v: Any, magnitude: float, lost: Any) -> None:
    """Write the loss of v, its difference to the decoded value."""
    bits = ins.float_bits(magnitude)
    for i in range(len(lost)):
        lost[i] = v[i] - ins.bits_float(nb.uint32(bits | (ins.float_bits(v[i]) & blocks.SIGN)))


@kernel(nogil=True)
def encode(source: int, before: int, after: int, payload: int, count: int, block: int) -> None:
    """Encode `count` float32 at the address `source`, plus those at `before`, and write the loss to `after`.

    `before` and `after` are both 0 without a residual.
    """
    blocks_in_all = (count + block - 1) // block
    x = nb.carray(ins.as_pointer(source), count, np.float32)
    old = nb.carray(ins.as_pointer(before), count, np.float32)
    new = nb.carray(ins.as_pointer(after), count, np.float32)
    magnitudes = nb.carray(ins.as_pointer(payload), blocks_in_all, np.float32)
    signs = nb.carray(ins.as_pointer(payload + 4 * blocks_in_all), (count + 7) // 8, np.uint8)
    with_residual = before != 0
    sums, scratch = np.empty(block, np.float32), np.empty(block, np.float32)
    for number in range(blocks_in_all):
        first = number * block
        stop = min(first + block, count)
        mine = signs[first // 8 : (stop + 7) // 8]
        v = x[first:stop]
        if with_residual:
            blocks.add_to(sums[: stop - first], v, old[first:stop])
            v = sums[: stop - first]
        if blocks.greatest(v) >= blocks.INFINITY:
            magnitudes[number] = np.nan
            mine[:] = 0
            if with_residual and before != after:
                blocks.copy(new[first:stop], old[first:stop])
            continue
        mean = blocks.mean_magnitude(v, scratch[: stop - first])
        magnitude = mean if mean >= blocks.LEAST_NORMAL else nb.float32(0)
        magnitudes[number] = magnitude
        _write_signs(v, mine)
        if with_residual:
            _subtract(v, magnitude, new[first:stop])


@kernel(nogil=True)
def decode(payload: int, target: int, count: int, block: int, add: bool) -> None:
    """Decode a payload into the `count` float32 at the address `target`, or add the values."""
    blocks_in_all = (count + block - 1) // block
    magnitudes = nb.carray(ins.as_pointer(payload), blocks_in_all, np.float32)
    signs = nb.carray(ins.as_pointer(payload + 4 * blocks_in_all), (count + 7) // 8, np.uint8)
    out = nb.carray(ins.as_pointer(target), count, np.float32)
    decoded = np.empty(block, np.float32)
    for number in range(blocks_in_all):
        first = number * block
        stop = min(first + block, count)
        mine = signs[first // 8 : (stop + 7) // 8]
        if add:
            _read_signs(mine, magnitudes[number], decoded[: stop - first])
            blocks.add(out[first:stop], decoded[: stop - first])
        else:
            _read_signs(mine, magnitudes[number], out[first:stop])
