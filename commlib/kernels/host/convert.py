"""Casts between float32 and half precision: much faster than numpy's and ml_dtypes' casts, with the same results.

Values round to nearest even, values that are too large become infinite, and a NaN stays a NaN.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numba as nb
import numpy as np
import numpy.typing as npt

from commlib.buffers.views import address_of
from commlib.errors import UsageError
from commlib.kernels.host import intrinsics as ins
from commlib.kernels.host.compilation import kernel

_FLOAT32, _FLOAT16, _BFLOAT16 = np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)

# Elements per pass. Separate passes let LLVM assume that memory does not alias; 4 KiB stay in the L1 cache.
_BLOCK = 1024

_INFINITY = nb.uint32(0x7F800000)
_MAGNITUDE = nb.uint32(0x7FFFFFFF)
_SIGN = nb.uint32(0x80000000)
_QUIET_NAN = nb.uint32(0x7FC00000)


@nb.njit(inline="always")  # type: ignore[untyped-decorator]
def _to_bfloat(value: float) -> Any:
    """Round any float32 to bfloat16 (as uint16 bits); a NaN becomes the quiet NaN of its sign, as in ml_dtypes."""
    bits = ins.float_bits(value)
    nan = nb.uint32(_QUIET_NAN | (bits & _SIGN))
    return nb.uint16((nan if (bits & _MAGNITUDE) > _INFINITY else ins.round_to_bfloat(value)) >> nb.uint32(16))


@kernel(nogil=True)
def narrow(source: int, target: int, count: int, bfloat: bool) -> None:
    """Round `count` float32 values at `source` to float16 or bfloat16 at `target`."""
    x = nb.carray(ins.as_pointer(source), count, np.float32)
    y = nb.carray(ins.as_pointer(target), count, np.uint16)
    if bfloat:
        for i in range(count):
            y[i] = _to_bfloat(x[i])
    else:
        for i in range(count):
            y[i] = ins.float_to_half(x[i])


@kernel(nogil=True)
def widen(source: int, target: int, count: int, bfloat: bool, add: bool) -> None:
    """Write `count` float16 or bfloat16 values at `source` to the float32 values at `target`, or add them."""
    x = nb.carray(ins.as_pointer(source), count, np.uint16)
    y = nb.carray(ins.as_pointer(target), count, np.float32)
    if bfloat and add:
        for i in range(count):
            y[i] += ins.bfloat_to_float(x[i])
    elif bfloat:
        for i in range(count):
            y[i] = ins.bfloat_to_float(x[i])
    elif add:
        for i in range(count):
            y[i] += ins.half_to_float(x[i])
    else:
        for i in range(count):
            y[i] = ins.half_to_float(x[i])


@nb.njit(inline="always")  # type: ignore[untyped-decorator]
def _loss(value: float, rounded: float, before: float) -> Any:
    """Return the loss of rounding to `rounded`, or the previous loss if the new one is not finite."""
    return before if (ins.float_bits(rounded) & _MAGNITUDE) >= _INFINITY else value - rounded


@kernel(nogil=True)
def narrow_sum(source: int, before: int, after: int, target: int, count: int, bfloat: bool) -> None:
    """Round source + before, and write the loss to `after`, which may be `before`; otherwise as `narrow`.

    An element that does not stay finite leaves after = before.
    """
    x = nb.carray(ins.as_pointer(source), count, np.float32)
    b = nb.carray(ins.as_pointer(before), count, np.float32)
    a = nb.carray(ins.as_pointer(after), count, np.float32)
    y = nb.carray(ins.as_pointer(target), count, np.uint16)
    lost = np.empty(_BLOCK, np.float32)
    for start in range(0, count, _BLOCK):
        stop = min(start + _BLOCK, count)
        xs, bs, ys, rest = x[start:stop], b[start:stop], y[start:stop], a[start:stop]
        if bfloat:
            for i in range(len(ys)):
                value = xs[i] + bs[i]
                bits = _to_bfloat(value)
                ys[i] = bits
                lost[i] = _loss(value, ins.bfloat_to_float(bits), bs[i])
        else:
            for i in range(len(ys)):
                value = xs[i] + bs[i]
                bits = ins.float_to_half(value)
                ys[i] = bits
                lost[i] = _loss(value, ins.half_to_float(bits), bs[i])
        for i in range(len(rest)):
            rest[i] = lost[i]


def convert(source: npt.NDArray[Any], target: npt.NDArray[Any]) -> None:
    """Convert the values of `source` to the dtype of `target`: float32 to float16 or bfloat16, or back.

    Both are C-contiguous numpy arrays of the same size. The GIL is released. Raises UsageError for other arrays.
    """
    dtypes = source.dtype, target.dtype
    if not (source.flags.c_contiguous and target.flags.c_contiguous and source.size == target.size):
        raise UsageError(
            f"convert takes two C-contiguous arrays of the same size, but got {source.shape} with strides "
            f"{source.strides} and "
            f"{target.shape} with strides {target.strides}: pass numpy.ascontiguousarray(x)"
        )
    half = target.dtype if dtypes[0] == _FLOAT32 else source.dtype
    if _FLOAT32 not in dtypes or half not in (_FLOAT16, _BFLOAT16):
        raise UsageError(f"convert takes float32 and one of float16 and bfloat16, not {dtypes[0]} and {dtypes[1]}")
    if not target.flags.writeable:
        raise UsageError("convert: target is read-only: pass a writable array for the result")
    if half is target.dtype:
        narrow(address_of(source), address_of(target), source.size, half == _BFLOAT16)
    else:
        widen(address_of(source), address_of(target), source.size, half == _BFLOAT16, False)
