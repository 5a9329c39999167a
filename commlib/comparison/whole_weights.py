"""Gradients of whole weights: when they are compared among ranks that must have the same ones, and which differs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np

from commlib.dtypes import Array

EVERY = 64
"""Steps from one comparison to the next, after that many; those before are the first, and powers of two."""
_TOLERANCES = {"float64": 1e-7, "float32": 1e-3}
_OF_HALVES, _OF_A_CODEC = 5e-2, 0.2
MOST = 2**16
"""Elements of one gradient that are looked at."""


def is_due(step: int) -> bool:
    """Return whether gradients are compared before a step, of those from 1 on: seldom, so that it costs nothing."""
    return step % EVERY == 0 if step > EVERY else step & (step - 1) == 0


def tolerance_of(dtype: str, *, has_codec: bool = False) -> float:
    """Return by how much of its norm a tensor may differ between ranks."""
    return _OF_A_CODEC if has_codec else _TOLERANCES.get(dtype, _OF_HALVES)


@cache
def direction() -> Array:
    """Return weights for sums of elements, that are the same on all ranks, and in no order."""
    return np.asarray(np.cos(np.arange(2 * MOST, dtype=np.float64) ** 2 % 1001), np.float64)


def print_of(values: Array) -> float:
    """Return a number that tells the values of a weight from others: other signs and orders differ, too."""
    flat = values.reshape(-1)[:MOST]
    return float(flat.astype(np.float64) @ direction()[: flat.size])


def worst_of(squares: Array, dtypes: Sequence[str], has_codec: bool = False) -> tuple[int, int, int] | None:
    """Return which gradient differs most, and the ranks with the least and the largest; None if all are the same.

    squares: [ranks, gradients]. Nothing is said of what is not finite.
    """
    if not squares.size or not np.isfinite(squares).all():
        return None
    norms = np.sqrt(squares)
    low, high = norms.min(0), norms.max(0)
    tolerance = max(tolerance_of(dtype, has_codec=has_codec) for dtype in dtypes)
    # What is zero but for rounding differs by as much as it has.
    apart = (high - low) / np.maximum(high, max(high.max() / 100, np.finfo(np.float64).tiny))
    worst = int(apart.argmax())
    if apart[worst] <= tolerance:
        return None
    return worst, int(norms[:, worst].argmin()), int(norms[:, worst].argmax())
