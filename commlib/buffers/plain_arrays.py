"""Plain arrays: numpy arrays that a verb can use directly, without a view."""

from __future__ import annotations

from typing import Any

from numpy import ndarray


def are_plain(x: Any, out: Any) -> bool:
    """Return whether a verb can read `x`, a numpy array, and write `out` directly. out: None means a new array."""
    if out is x:
        return bool(x.flags.carray)
    return bool(x.flags.c_contiguous) and (
        out is None or (type(out) is ndarray and out.dtype is x.dtype and out.shape == x.shape and out.flags.carray)
    )
