"""Quantization in blocks: each element as a multiple of its block's unit, or as a small float times the unit.

A payload has the units of all blocks (float32), then the codes of all elements. A unit is the greatest magnitude of the
block, or its Euclidean norm, divided by the greatest code `top`. Two units have a special meaning:

    NaN   the block had an infinity or NaN; all elements decode to NaN, and the residual does not change
    0     the block is zero, or so small that units or decoded values would be denormal; all elements decode to 0

Denormal numbers are excluded, because frameworks have threads that flush them to zero: ranks would decode differently.
"""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np

from commlib.kernels.host import blocks
from commlib.kernels.host import intrinsics as ins
from commlib.kernels.host.compilation import kernel
from commlib.kernels.host.noise import keys, uniform

# Kinds of codes: integers of 8 or 4 bits, floats with 4 bits of exponent and 3 of mantissa, or with 5 and 2.
INT8, INT4, E4M3, E5M2 = range(4)

# 1.5 * 2^23: adding a number below 2^22 rounds it to an integer, to nearest even, in the lowest bits.
_TO_INTEGER = nb.float32(12582912.0)
_TO_INTEGER_BITS = nb.uint32(0x4B400000)

_ONE = nb.uint32(0x3F800000)


@nb.njit(inline="always")  # type: ignore[untyped-decorator]
def code_bytes(kind: int, count: int) -> int:
    """Return the number of bytes of the codes of one block."""
    return (count + 1) // 2 if kind == INT4 else count


@nb.njit(inline="always")  # type: ignore[untyped-decorator]
def _float_kind(kind: int) -> Any:
    """Return (bits of the mantissa, exponent of the least normal number) of a kind of small float."""
    return (3, -6) if kind == E4M3 else (2, -14)


@nb.njit(inline="always")  # type: ignore[untyped-decorator]
def _power(exponent: int) -> Any:
    """Return 2^exponent as float32."""
    return ins.bits_float(nb.uint32((exponent + 127) << 23))


@nb.njit(nogil=True)  # type: ignore[untyped-decorator]
def _unit(size: float, top: float, kind: int) -> Any:
    """Return the unit of a block with this greatest magnitude or norm."""
    # One bit less than the quotient of the greatest number keeps top * unit finite for any rounding.
    limit = ins.bits_float(nb.uint32(ins.float_bits(blocks.GREATEST / top) - nb.uint32(1)))
    least = blocks.LEAST_NORMAL
    if kind >= E4M3:
        mantissa, exponent = _float_kind(kind)
        least = _power(mantissa - exponent - 126)  # times the least denormal code it is the least normal number
    unit = min(size / top, limit)
    return unit if unit >= least else nb.float32(0)


@nb.njit(nogil=True)  # type: ignore[untyped-decorator]
def _round_to_integers(v: Any, inverse: float, r: Any) -> None:
    """Write v * inverse, rounded to nearest even, to r."""
    for i in range(len(r)):
        r[i] = (v[i] * inverse + _TO_INTEGER) - _TO_INTEGER


@nb.njit(nogil=True)  # type: ignore[untyped-decorator]
def _round_at_random(v: Any, inverse: float, r: Any, top: float, first: int, two_keys: Any) -> None:
    """Write v * inverse, rounded at random to one of its two neighbors without bias, to r."""
    first_key, second_key = two_keys
    for i in range(len(r)):
        wanted = v[i] * inverse
        near = (wanted + _TO_INTEGER) - _TO_INTEGER
        rest = wanted - near  # exact, at most a half: the probability of the neighbor on its side
        step = ins.bits_float(nb.uint32(_ONE | (ins.float_bits(rest) & blocks.SIGN)))
        chosen = near + (step if uniform(first + i, first_key, second_key) < abs(rest) else nb.float32(0))
        r[i] = min(max(chosen, -top), top)


@nb.njit(nogil=True)  # type: ignore[untyped-decorator]
def _round_to_floats(v: Any, inverse: float, r: Any, kind: int) -> None:
    """Write v * inverse, rounded to the nearest number (to even) of the kind of small float, to r."""
    mantissa, exponent = _float_kind(kind)
    shift = nb.uint32(23 - mantissa)
    below_half = nb.uint32((1 << (22 - mantissa)) - 1)
    mask = nb.uint32(0xFFFFFFFF << (23 - mantissa))
    least = _power(exponent)
    to_denormal = _power(exponent - mantissa + 23)  # see _TO_INTEGER; here in units of the least denormal
    for i in range(len(r)):
        bits = ins.float_bits(v[i] * inverse)
        size = nb.uint32(bits & blocks.MAGNITUDE)
        normal = nb.uint32((size + below_half + ((size >> shift) & nb.uint32(1))) & mask)
        denormal = ins.float_bits((ins.bits_float(size) + to_denormal) - to_denormal)
        rounded = denormal if ins.bits_float(size) < least else normal
        r[i] = ins.bits_float(nb.uint32(rounded | (bits & blocks.SIGN)))


@nb.njit(nogil=True)  # type: ignore[untyped-decorator]
def _subtract(v: Any, r: Any, unit: float, lost: Any) -> None:
    """Write the loss of v, its difference to the decoded value r * unit, to `lost`."""
    for i in range(len(lost)):
        lost[i] = v[i] - r[i] * unit


@nb.njit(inline="always")  # type: ignore[untyped-decorator]
def _integer(r: float) -> Any:
    return nb.uint32(ins.float_bits(r + _TO_INTEGER) - _TO_INTEGER_BITS)


@nb.njit(nogil=True)  # type: ignore[untyped-decorator]
def _write_codes(r: Any, codes: Any, kind: int) -> None:
    """Write the codes of the rounded numbers r. With 4 bits, their first half goes to the lower halves of the bytes."""
    if kind == INT8:
        for i in range(len(codes)):
            codes[i] = nb.uint8(_integer(r[i]))
    elif kind == INT4:
        low, high = r[: len(codes)], r[len(codes) :]
        for i in range(len(codes)):
            codes[i] = nb.uint8(_integer(low[i]) & nb.uint32(15))
        for i in range(len(high)):
            codes[i] |= nb.uint8(nb.uint32(_integer(high[i]) << nb.uint32(4)))
    else:
        mantissa, exponent = _float_kind(kind)
        shift = nb.uint32(23 - mantissa)
        bias = nb.uint32((126 + exponent) << mantissa)
        least, to_denormal = _power(exponent), _power(exponent - mantissa + 23)
        for i in range(len(codes)):
            bits = ins.float_bits(r[i])
            size = nb.uint32(bits & blocks.MAGNITUDE)
            normal = nb.uint32((size >> shift) - bias)
            denormal = nb.uint32(ins.float_bits(ins.bits_float(size) + to_denormal) - ins.float_bits(to_denormal))
            code = denormal if ins.bits_float(size) < least else normal
            codes[i] = nb.uint8(code | ((bits & blocks.SIGN) >> nb.uint32(24)))


@nb.njit(nogil=True)  # type: ignore[untyped-decorator]
def _read_codes(codes: Any, unit: float, target: Any, kind: int) -> None:
    """Decode the codes of one block into target."""
    if kind == INT8:
        for i in range(len(target)):
            target[i] = nb.float32(nb.int8(codes[i])) * unit
    elif kind == INT4:
        low, high = target[: len(codes)], target[len(codes) :]
        for i in range(len(low)):
            low[i] = nb.float32(nb.int8(codes[i] << nb.uint8(4)) >> nb.int8(4)) * unit
        for i in range(len(high)):
            high[i] = nb.float32(nb.int8(codes[i]) >> nb.int8(4)) * unit
    else:
        mantissa, exponent = _float_kind(kind)
        shift = nb.uint32(23 - mantissa)
        bias = nb.uint32((126 + exponent) << mantissa)
        least, denormal = nb.uint32(1 << mantissa), _power(exponent - mantissa)
        for i in range(len(target)):
            size = nb.uint32(codes[i] & nb.uint8(127))
            normal = ins.float_bits(ins.bits_float(nb.uint32((size + bias) << shift)))
            small = ins.float_bits(nb.float32(nb.int32(size)) * denormal)
            sign = nb.uint32(nb.uint32(codes[i] & nb.uint8(128)) << nb.uint32(24))
            target[i] = ins.bits_float(nb.uint32((small if size < least else normal) | sign)) * unit


@kernel(nogil=True)
def encode(
    source: int,
    before: int,
    after: int,
    payload: int,
    count: int,
    block: int,
    kind: int,
    top: float,
    by_norm: bool,
    at_random: bool,
    seed: int,
) -> None:
    """Encode `count` float32 at the address `source`, plus those at `before`, and write the loss to `after`.

    `before` and `after` are both 0 without a residual.
    """
    blocks_in_all = (count + block - 1) // block
    x = nb.carray(ins.as_pointer(source), count, np.float32)
    old = nb.carray(ins.as_pointer(before), count, np.float32)
    new = nb.carray(ins.as_pointer(after), count, np.float32)
    units = nb.carray(ins.as_pointer(payload), blocks_in_all, np.float32)
    codes = nb.carray(ins.as_pointer(payload + 4 * blocks_in_all), code_bytes(kind, block) * blocks_in_all, np.uint8)
    top, with_residual, two_keys = nb.float32(top), before != 0, keys(seed)
    sums, rounded = np.empty(block, np.float32), np.empty(block, np.float32)
    for number in range(blocks_in_all):
        first = number * block
        stop = min(first + block, count)
        at = number * code_bytes(kind, block)
        mine = codes[at : at + code_bytes(kind, stop - first)]
        v, r = x[first:stop], rounded[: stop - first]
        if with_residual:
            blocks.add_to(sums[: stop - first], v, old[first:stop])
            v = sums[: stop - first]
        size = blocks.greatest(v)
        if size >= blocks.INFINITY:
            units[number] = np.nan
            mine[:] = 0
            if with_residual and before != after:
                blocks.copy(new[first:stop], old[first:stop])
            continue
        unit = _unit(blocks.norm(v, size, r) if by_norm else ins.bits_float(size), top, kind)
        inverse = nb.float32(1) / unit if unit > 0 else nb.float32(0)
        if kind >= E4M3:
            _round_to_floats(v, inverse, r, kind)
        elif at_random:
            _round_at_random(v, inverse, r, top, first, two_keys)
        else:
            _round_to_integers(v, inverse, r)
        units[number] = unit
        _write_codes(r, mine, kind)
        if with_residual:
            _subtract(v, r, unit, new[first:stop])


@kernel(nogil=True)
def decode(payload: int, target: int, count: int, block: int, kind: int, add: bool) -> None:
    """Decode a payload into the `count` float32 at the address `target`, or add the values."""
    blocks_in_all = (count + block - 1) // block
    units = nb.carray(ins.as_pointer(payload), blocks_in_all, np.float32)
    codes = nb.carray(ins.as_pointer(payload + 4 * blocks_in_all), code_bytes(kind, block) * blocks_in_all, np.uint8)
    out = nb.carray(ins.as_pointer(target), count, np.float32)
    decoded = np.empty(block, np.float32)
    for number in range(blocks_in_all):
        first = number * block
        stop = min(first + block, count)
        at = number * code_bytes(kind, block)
        mine = codes[at : at + code_bytes(kind, stop - first)]
        if add:
            _read_codes(mine, units[number], decoded[: stop - first], kind)
            blocks.add(out[first:stop], decoded[: stop - first])
        else:
            _read_codes(mine, units[number], out[first:stop], kind)
