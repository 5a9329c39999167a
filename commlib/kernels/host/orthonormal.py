"""Gram-Schmidt in float64, with the same bits on every type of CPU."""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np

from commlib.kernels.host.compilation import kernel

_f8 = nb.float64


@kernel(nogil=True)
def dot(x: Any, y: Any) -> float:
    """Return the dot product of two 1-D arrays: in float64, in an order that depends only on their length."""
    # Eight parallel sums: a single one would wait for each addition.
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
    """Make `rank` float32 vectors, which are stored consecutively in `vectors`, orthonormal in place.

    A vector becomes zero if no more than `epsilon` of its length remains after the projection on the previous vectors
    is subtracted: it is zero, or the remainder consists of rounding errors. Returns how many vectors became zero; or
    -1, without changing the vectors, if not all numbers are finite.
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
        for _ in range(2):  # twice, because the first pass leaves errors that are large relative to a small remainder
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
