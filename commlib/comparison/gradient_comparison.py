"""Gradient comparison of unsharded weights: when ranks compare gradients that must be equal, and which one differs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np

from commlib.dtypes import Array

EVERY = 64
"""Steps between comparisons, from this step on; before it, the powers of two are compared."""
_TOLERANCES = {"float64": 1e-7, "float32": 1e-3}
_OF_HALVES, _OF_A_CODEC = 5e-2, 0.2
MOST = 2**16
"""Maximum number of compared elements of a gradient."""


def is_due(step: int) -> bool:
    """Return whether gradients are compared before a step, counted from 1. Comparisons are rare, and so cheap."""
    return step % EVERY == 0 if step > EVERY else step & (step - 1) == 0


def tolerance_of(dtype: str, *, has_codec: bool = False) -> float:
    """Return by how much a tensor may differ between ranks, relative to its norm."""
    return _OF_A_CODEC if has_codec else _TOLERANCES.get(dtype, _OF_HALVES)


@cache
def direction() -> Array:
    """Return irregular weights for sums of elements, the same on all ranks."""
    return np.asarray(np.cos(np.arange(2 * MOST, dtype=np.float64) ** 2 % 1001), np.float64)


def print_of(values: Array) -> float:
    """Return a fingerprint of the values of a weight; permutations and changes of sign change it."""
    flat = values.reshape(-1)[:MOST]
    return float(flat.astype(np.float64) @ direction()[: flat.size])


def worst_of(squares: Array, dtypes: Sequence[str], has_codec: bool = False) -> tuple[int, int, int] | None:
    """Return the gradient that differs most, and the ranks with the least and largest norm; None if all are equal.

    squares: [ranks, gradients]. Returns None if any is not finite.
    """
    if not squares.size or not np.isfinite(squares).all():
        return None
    norms = np.sqrt(squares)
    low, high = norms.min(0), norms.max(0)
    tolerance = max(tolerance_of(dtype, has_codec=has_codec) for dtype in dtypes)
    # Gradients that are zero except for rounding have large relative differences: bound the denominator.
    differences = (high - low) / np.maximum(high, max(high.max() / 100, np.finfo(np.float64).tiny))
    worst = int(differences.argmax())
    if differences[worst] <= tolerance:
        return None
    return worst, int(norms[:, worst].argmin()), int(norms[:, worst].argmax())
