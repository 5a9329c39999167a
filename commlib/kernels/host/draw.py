"""Random places in an array, the same on all ranks for the same seed, and what is there."""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np

from commlib.kernels.host.compiled import kernel
from commlib.kernels.host.sparse import FLOAT32, write
from commlib.kernels.host.sparsify import BLOCK, feed, floats, is_finite

_STEP = 0x9E3779B97F4A7C15


@nb.njit(inline="always")  # type: ignore[untyped-decorator]
def _mix(x: int) -> Any:
    """Scatter the bits of a counter over a word: the finaliser of SplitMix64 (Steele, Lea and Flood 2014)."""
    x = (x ^ (x >> nb.uint64(30))) * nb.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> nb.uint64(27))) * nb.uint64(0x94D049BB133111EB)
    return x ^ (x >> nb.uint64(31))


@nb.njit(inline="always")  # type: ignore[untyped-decorator]
def _below(limit: int, number: int) -> Any:
    """Map a random word to 0 .. limit - 1, for limits up to 2**32."""
    return np.int64(((number >> nb.uint64(32)) * nb.uint64(limit)) >> nb.uint64(32))


@kernel(nogil=True)
def draw(count: int, seed: int, indices: Any) -> None:
    """Fill `indices` (uint32) with so many different numbers below `count`, ascending, by chance.

    One is drawn from each of len(indices) stretches of equal length (to one element), which begin anywhere on the
    circle of all elements: so each element has the same chance.
    """
    k = len(indices)
    state = _mix(nb.uint64(seed) + nb.uint64(_STEP))
    shift = _below(count, state)
    places = np.empty(k, np.int64)
    turned: Any = 0  # how many places have gone round; they are the last, and come first
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
def _broken(x: Any) -> int:
    """Return how many elements are not finite."""
    found = 0
    for i in range(len(x)):
        found += 0 if is_finite(x[i]) else 1
    return found


@kernel(nogil=True)
def take(source: int, before: int, after: int, count: int, indices: Any, scale: float, values: Any) -> None:
    """Write what x, or x + before, has at the indices to `values`, times `scale`, and what is lost to `after`.

    If anything in x is not finite all values are NaN.
    """
    broken: Any = 0
    scratch = np.empty(BLOCK, np.float32)
    for start in range(0, count, BLOCK):
        stop = min(start + BLOCK, count)
        y = x = floats(source, start, stop)
        if before != 0:
            y = scratch[: len(x)]
            feed(x, floats(before, start, stop), floats(after, start, stop), y)
        broken += _broken(y)
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
    """Write k random elements of x, or of x + before, to the payload and what is lost to `after`; return the length."""
    indices, values = np.empty(k, np.uint32), np.empty(k, np.float32)
    draw(count, seed, indices)
    take(source, before, after, count, indices, scale, values)
    return write(indices, values.view(np.uint32), k, FLOAT32, payload)
