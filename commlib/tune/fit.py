"""Fit alpha, beta and gamma to measured times, by least squares."""

from __future__ import annotations

from collections.abc import Sequence

from commlib.errors import UsageError
from commlib.schedule import LinkCost

Samples = Sequence[tuple[float, float]]
"""(bytes, seconds) of each measurement."""


def fit_link(samples: Samples) -> LinkCost:
    """Return the non-negative alpha and beta for which alpha + beta n is closest to the seconds of all samples.

    Closest means the least sum of squared *relative* errors. With absolute errors the largest messages alone would
    decide, and alpha, which shows only in small messages, would drown in their noise. Raises UsageError for fewer than
    two different sizes or a time that is not positive.
    """
    if len({nbytes for nbytes, _ in samples}) < 2:
        raise UsageError(f"fitting a line needs messages of two sizes or more, got {list(samples)!r:.80}")
    if not all(seconds > 0 for _, seconds in samples):
        raise UsageError(f"times must be positive, got {list(samples)!r:.80}")
    # Divided by t, alpha + beta n = t reads alpha u + beta v = 1 with u = 1/t, v = n/t; its normal equations:
    uu = sum(1 / seconds**2 for _, seconds in samples)
    uv = sum(nbytes / seconds**2 for nbytes, seconds in samples)
    vv = sum((nbytes / seconds) ** 2 for nbytes, seconds in samples)
    u = sum(1 / seconds for _, seconds in samples)
    v = sum(nbytes / seconds for nbytes, seconds in samples)
    determinant = uu * vv - uv * uv
    alpha, beta = (u * vv - v * uv) / determinant, (uu * v - uv * u) / determinant
    if alpha < 0:  # on the border of the feasible region, one of the two is zero
        return LinkCost(0.0, v / vv)
    if beta < 0:
        return LinkCost(u / uu, 0.0)
    return LinkCost(alpha, beta)


def fit_gamma(samples: Samples) -> float:
    """Return the seconds per byte that is combined, without the constant cost of a call."""
    return fit_link(samples).beta
