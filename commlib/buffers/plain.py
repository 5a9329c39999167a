"""Plain: numpy arrays that need no view, because they are what a view of them would be."""

from __future__ import annotations

from typing import Any

from numpy import ndarray


def are_plain(x: Any, out: Any) -> bool:
    """Return whether a result of `x`, a numpy array, may be written to `out` as it is; None is a new array."""
    if out is x:
        return bool(x.flags.carray)
    return bool(x.flags.c_contiguous) and (
        out is None or (type(out) is ndarray and out.dtype is x.dtype and out.shape == x.shape and out.flags.carray)
    )
