"""Array access: read fields of numpy arrays, given by their `id`, and numbers at addresses, in compiled code."""

from __future__ import annotations

import ctypes
from typing import Any

import numba as nb
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from commlib.dtypes import NUMPY
from commlib.kernels.host import intrinsics as ins

# Offsets of the array fields that kernels read (PyArrayObject_fields, after the object header), and three array flags.
_HEAD = object.__basicsize__
DATA, NDIM, SHAPE, DESCR, FLAGS = _HEAD, _HEAD + 8, _HEAD + 16, _HEAD + 40, _HEAD + 48
C_CONTIGUOUS, ALIGNED, WRITEABLE = 0x1, 0x100, 0x400

_PAIRS = [number for dtype in NUMPY.values() for number in (id(dtype), dtype.itemsize)]
_DTYPES = np.array([*_PAIRS, 0, 0], np.int64)

DTYPES_AT: int = _DTYPES.ctypes.data
"""Address of a table for `plain_bytes`: the `id` and item size of each dtype that commlib moves, terminated by 0."""


@intrinsic
def exchange(typingctx: Any, address: Any, value: Any) -> Any:
    """Atomically write the int64 `value` to `address` and return the previous value."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("xchg", pointer, args[1], "acq_rel")

    return types.int64(types.intp, types.int64), codegen


@intrinsic
def exchange_if(typingctx: Any, address: Any, expected: Any, value: Any) -> Any:
    """Atomically write the int64 `value` to `address` if it holds `expected`; return the previous value."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        pair = builder.cmpxchg(pointer, args[1], args[2], "acq_rel", "acquire")
        return builder.extract_value(pair, 0)

    return types.int64(types.intp, types.int64, types.int64), codegen


@nb.njit(inline="always")  # type: ignore[untyped-decorator]
def table(address: int, length: int) -> Any:
    """Return the int64 numbers at an address."""
    return nb.carray(ins.as_pointer(address), length, np.int64)


@nb.njit(inline="always")  # type: ignore[untyped-decorator]
def int32(address: int) -> Any:
    """Return the int32 at an address."""
    return nb.carray(ins.as_pointer(address), 1, np.int32)[0]


@nb.njit(inline="always")  # type: ignore[untyped-decorator]
def plain_bytes(array: int, flags: int, dtypes: int) -> Any:
    """Return the number of bytes of an array that has all these flags and a dtype of the table; -1 for other arrays."""
    if int32(array + FLAGS) & flags != flags:
        return -1
    descr, entry = ins.load_acquire(array + DESCR), dtypes
    while ins.load_acquire(entry) != descr:
        if ins.load_acquire(entry) == 0:
            return -1
        entry += 16
    nbytes, ndim = ins.load_acquire(entry + 8), int32(array + NDIM)
    lengths = table(ins.load_acquire(array + SHAPE), ndim)
    for dimension in range(ndim):
        nbytes *= lengths[dimension]
    return nbytes


def are_where_expected() -> bool:
    """Return whether numpy's array layout is the one that kernels expect."""
    probe = np.zeros((3, 5, 7), np.float32)[1:]
    gaps, at = probe[:, ::2], id(probe)
    gaps.flags.writeable = False
    shape = (ctypes.c_int64 * 3).from_address(ctypes.c_int64.from_address(at + SHAPE).value)
    every = C_CONTIGUOUS | ALIGNED | WRITEABLE
    return (
        ctypes.c_int64.from_address(at + DATA).value == probe.ctypes.data
        and ctypes.c_int32.from_address(at + NDIM).value == 3
        and tuple(shape) == probe.shape
        and ctypes.c_int64.from_address(at + DESCR).value == id(probe.dtype)
        and ctypes.c_int32.from_address(at + FLAGS).value & every == every
        and ctypes.c_int32.from_address(id(gaps) + FLAGS).value & every == ALIGNED
    )
