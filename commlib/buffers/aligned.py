"""Make arrays that frameworks adopt: their memory begins at an aligned address."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from commlib.dtypes import Array, numpy_dtype

ALIGNMENT = 64
"""Bytes: a cache line. TensorFlow adopts memory that begins at a multiple of it, and copies other memory."""


def aligned_empty(shape: Sequence[int], dtype: Any) -> Array:
    """Return a new array with undefined values whose memory begins at a multiple of 64 bytes."""
    kind = numpy_dtype(dtype)
    nbytes = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
    memory = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    array: Array = memory[start : start + nbytes].view(kind).reshape(tuple(shape))
    return array
