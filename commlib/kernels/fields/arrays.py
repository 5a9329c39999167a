"""Fields of numpy arrays that compiled code reads, and whether this numpy has them there."""

from __future__ import annotations

import ctypes

import numpy as np

from commlib.dtypes import NUMPY

# Offsets of the array fields that kernels read (PyArrayObject_fields, after the object header), and three array flags.
_HEAD = object.__basicsize__
TYPE = _HEAD - 8
DATA, NDIM, SHAPE, DESCR, FLAGS = _HEAD, _HEAD + 8, _HEAD + 16, _HEAD + 40, _HEAD + 48
C_CONTIGUOUS, ALIGNED, WRITEABLE = 0x1, 0x100, 0x400

_PAIRS = [number for dtype in NUMPY.values() for number in (id(dtype), dtype.itemsize)]
_DTYPES = np.array([*_PAIRS, 0, 0], np.int64)

DTYPES_AT: int = _DTYPES.ctypes.data
"""Address of a table for `plain_bytes`: the `id` and item size of each dtype that commlib moves, terminated by 0."""


def are_where_expected() -> bool:
    """Return whether numpy's array layout is the one that kernels expect."""
    probe = np.zeros((3, 5, 7), np.float32)[1:]
    gaps, at = probe[:, ::2], id(probe)
    gaps.flags.writeable = False
    shape = (ctypes.c_int64 * 3).from_address(ctypes.c_int64.from_address(at + SHAPE).value)
    every = C_CONTIGUOUS | ALIGNED | WRITEABLE
    return (
        ctypes.c_int64.from_address(at + TYPE).value == id(np.ndarray)
        and ctypes.c_int64.from_address(at + DATA).value == probe.ctypes.data
        and ctypes.c_int32.from_address(at + NDIM).value == 3
        and tuple(shape) == probe.shape
        and ctypes.c_int64.from_address(at + DESCR).value == id(probe.dtype)
        and ctypes.c_int32.from_address(at + FLAGS).value & every == every
        and ctypes.c_int32.from_address(id(gaps) + FLAGS).value & every == ALIGNED
    )
