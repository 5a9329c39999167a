"""Pack the flags of a bucket into bits, on the host for every bucket, because they are few."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from commlib.dtypes import Array


def pack_flags(flags: Array) -> Array:
    """Return a bit for each flag (float32) that is set if it is positive (uint8 array)."""
    return np.packbits(flags > 0)


def count_flags(payloads: Iterable[Array], count: int) -> Array:
    """Return for each of `count` flags the number of `pack_flags` payloads in which it is set (float32)."""
    counts = np.zeros(count, np.float32)
    for bits in payloads:
        counts += np.unpackbits(bits, count=count)
    return counts
