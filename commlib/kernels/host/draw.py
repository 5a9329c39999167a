"""Random places in an array, the same on all ranks for the same seed, and the elements at them."""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np

from commlib.kernels.host.compilation import kernel
from commlib.kernels.host.sparse import FLOAT32, write
from commlib.kernels.host.sparsify import BLOCK, feed, floats, is_finite

_STEP = 0x9E3779B97F4A7C15


@nb.njit(inline="always")  # type: ignore[untyped-decorator]
def _mix(x: int) -> Any:
    """Scatter the bits of a counter over a word: the finalizer of SplitMix64 (Steele, Lea and Flood 2014)."""
    x = (x ^ (x >> nb.uint64(30))) * nb.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> nb.uint64(27))) * nb.uint64(0x94D049BB133111EB)
    return x ^ (x >> nb.uint64(31))


@nb.njit(inline="always")  # type: ignore[untyped-decorator]
def _below(limit: int, number: int) -> Any:
    """Map a random word to 0 .. limit - 1, for limits up to 2**32."""
    return np.int64(((number >> nb.uint64(32)) * nb.uint64(limit)) >> nb.uint64(32))


@kernel(nogil=True)
def draw(count: int, seed: int, indices: Any) -> None:
    """Fill `indices` (uint32) with distinct random numbers below `count`, in ascending order.

    One is drawn from each of len(indices) stretches of equal length (to one element), with a random offset on the
    circle of all elements. Each element therefore has the same chance.
    """
    k = len(indices)
    state = _mix(nb.uint64(seed) + nb.uint64(_STEP))
    shift = _below(count, state)
    places = np.empty(k, np.int64)
    turned: Any = 0  # number of places that wrapped around: the last ones drawn, and the first in order
    for j in range(k):
        start = j * count // k
        state += nb.uint64(_STEP)
        places[j] = start + shift + _below((j + 1) * count // k - start, _mix(state))
        turned += places[j] >= count
    for j in range(turned):
        indices[j] = places[k - turned + j] - count
    for j in range(k - turned):
        indices[turned + j] = places[j]


@kernel(nogil=True)
def _count_nonfinite(x: Any) -> int:
    """Return the number of elements that are not finite."""
    count = 0
    for i in range(len(x)):
        count += 0 if is_finite(x[i]) else 1
    return count


@kernel(nogil=True)
def take(source: int, before: int, after: int, count: int, indices: Any, scale: float, values: Any) -> None:
    """Write the elements of x, or x + before, at the indices to `values`, times `scale`, and the loss to `after`.

    If any element of x is not finite, all values are NaN.
    """
    broken: Any = 0
    scratch = np.empty(BLOCK, np.float32)
    for start in range(0, count, BLOCK):
        stop = min(start + BLOCK, count)
        y = x = floats(source, start, stop)
        if before != 0:
            y = scratch[: len(x)]
            feed(x, floats(before, start, stop), floats(after, start, stop), y)
        broken += _count_nonfinite(y)
    summed = floats(source if before == 0 else after, 0, count)
    factor = nb.float32(scale)
    for i in range(len(indices)):
        value = summed[indices[i]]
        values[i] = nb.float32(np.nan) if broken > 0 else value * factor
        lost = value - values[i]
        if before != 0 and is_finite(lost):
            summed[indices[i]] = lost


@kernel(nogil=True)
def encode_random(
    source: int, before: int, after: int, count: int, k: int, seed: int, scale: float, payload: int
) -> int:
    """Write k random elements of x, or of x + before, to the payload, and the loss to `after`; return the length."""
    indices, values = np.empty(k, np.uint32), np.empty(k, np.float32)
    draw(count, seed, indices)
    take(source, before, after, count, indices, scale, values)
    return write(indices, values.view(np.uint32), k, FLOAT32, payload)
