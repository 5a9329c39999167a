"""Array access: read fields of numpy arrays, given by their `id`, and numbers at addresses, in compiled code."""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from commlib.kernels.fields.arrays import (
    DESCR,
    FLAGS,
    NDIM,
    SHAPE,
)
from commlib.kernels.host import intrinsics as ins


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
