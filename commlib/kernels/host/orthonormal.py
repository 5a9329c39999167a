"""Gram and Schmidt in float64, with the same bits on every kind of CPU."""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np

from commlib.kernels.host.compiled import kernel

_f8 = nb.float64


@kernel(nogil=True)
def dot(x: Any, y: Any) -> float:
    """Return the sum of x * y of two 1-D arrays: in float64, in an order that depends on their length alone."""
    # Eight sums side by side: one alone would wait for each addition.
    s0, s1, s2, s3, s4, s5, s6, s7 = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    whole = len(x) // 8 * 8
    for j in range(0, whole, 8):
        s0 += _f8(x[j]) * _f8(y[j])
        s1 += _f8(x[j + 1]) * _f8(y[j + 1])
        s2 += _f8(x[j + 2]) * _f8(y[j + 2])
        s3 += _f8(x[j + 3]) * _f8(y[j + 3])
        s4 += _f8(x[j + 4]) * _f8(y[j + 4])
        s5 += _f8(x[j + 5]) * _f8(y[j + 5])
        s6 += _f8(x[j + 6]) * _f8(y[j + 6])
        s7 += _f8(x[j + 7]) * _f8(y[j + 7])
    for j in range(whole, len(x)):
        s0 += _f8(x[j]) * _f8(y[j])
    return ((s0 + s1) + (s2 + s3)) + ((s4 + s5) + (s6 + s7))


@kernel(nogil=True)
def _subtract(x: Any, factor: float, y: Any) -> None:
    for j in range(len(x)):
        x[j] -= factor * y[j]


@kernel(nogil=True)
def orthonormalise(vectors: Any, rank: int, epsilon: float) -> int:
    """Make `rank` float32 vectors, one after another in `vectors`, orthonormal in place.

    A vector of which no more than `epsilon` of its length is left, when what the vectors before it span is taken away,
    becomes zero: it is zero itself, or what is left are rounding errors. Returns how many did; or -1, and leaves the
    vectors as they are, if not all numbers are finite.
    """
    n = len(vectors) // rank
    work = np.empty((rank, n), np.float64)
    dropped = 0
    for k in range(rank):
        x = work[k]
        x[:] = vectors[k * n : (k + 1) * n]
        length = np.sqrt(dot(x, x))
        if not np.isfinite(length):
            return -1
        for _ in range(2):  # once more, because the first time leaves errors that are large beside a small rest
            for other in range(k):
                _subtract(x, dot(work[other], x), work[other])
        rest = np.sqrt(dot(x, x))
        if rest <= epsilon * length:
            x[:] = 0.0
            dropped += 1
        else:
            for j in range(n):
                x[j] /= rest
    for k in range(rank):
        vectors[k * n : (k + 1) * n] = work[k]
    return dropped
