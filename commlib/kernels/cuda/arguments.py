"""Kernel arguments: numpy scalars of the exact widths that kernels declare."""

from __future__ import annotations

from typing import Any

import numpy as np

from commlib.buffers.views import address_of

u64, i32, u32, f32 = np.uint64, np.int32, np.uint32, np.float32


def pointer_to(x: Any) -> np.uint64:
    """Return the address of an array; 0 for None."""
    if x is None:
        return np.uint64(0)
    return np.uint64(address_of(x) if isinstance(x, np.ndarray) else x.address)
