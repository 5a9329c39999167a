"""Pack the flags of a bucket into bits. The host does so, wherever the bucket is: they are few."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from commlib.dtypes import Array


def pack_flags(flags: Array) -> Array:
    """Return which flags (float32) are positive, as bits (uint8)."""
    return np.packbits(flags > 0)


def count_flags(payloads: Iterable[Array], count: int) -> Array:
    """Return for each of `count` flags in how many payloads, which `pack_flags` made, it is positive (float32)."""
    found = np.zeros(count, np.float32)
    for bits in payloads:
        found += np.unpackbits(bits, count=count)
    return found
