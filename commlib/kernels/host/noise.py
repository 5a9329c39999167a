"""Counter-based random numbers: element i of an array has its own, so loops vectorize and pieces share no state."""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np

_TO_UNIT = nb.float32(2.0**-24)


@nb.njit(nogil=True)  # type: ignore[untyped-decorator]
def keys(seed: int) -> Any:
    """Return two 32-bit keys made from a 64-bit seed. Neighboring seeds give unrelated keys.

    The finalizer of SplitMix64 (Steele, Lea and Flood 2014).
    """
    z = np.uint64(seed) + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    return nb.uint32(z), nb.uint32(z >> np.uint64(32))


@nb.njit(inline="always")  # type: ignore[untyped-decorator]
def uniform(index: int, first_key: int, second_key: int) -> Any:
    """Return the random number of element `index`: a multiple of 2^-24, at least 0 and less than 1.

    Wellons' 32-bit hash "lowbias32", with a key before each of its two multiplications.
    """
    h = nb.uint32(nb.uint32(index) ^ first_key)
    h = nb.uint32((h ^ (h >> nb.uint32(16))) * nb.uint32(0x7FEB352D))
    h = nb.uint32(h ^ second_key)
    h = nb.uint32((h ^ (h >> nb.uint32(15))) * nb.uint32(0x846CA68B))
    h = nb.uint32(h ^ (h >> nb.uint32(16)))
    return nb.float32(nb.int32(h >> nb.uint32(8))) * _TO_UNIT
