"""Aligned arrays: arrays at aligned addresses, which frameworks adopt without a copy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from commlib.dtypes import Array, numpy_dtype

ALIGNMENT = 64
"""Bytes: a cache line. TensorFlow adopts memory at multiples of it, and copies other memory."""


def aligned_empty(shape: Sequence[int], dtype: Any) -> Array:
    """Return a new uninitialised array whose address is a multiple of 64 bytes."""
    kind = numpy_dtype(dtype)
    memory = np.empty(math.prod(shape) * kind.itemsize + ALIGNMENT, np.uint8)
    return np.ndarray(shape, kind, memory, -memory.ctypes.data % ALIGNMENT)
