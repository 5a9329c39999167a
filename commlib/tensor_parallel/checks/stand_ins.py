"""Stand-ins: what stands for a weight that is all zeros while numbers are compared.

Behind a gate that is zero at first, as behind LoRA's second factor, everything gives the same, be it right or wrong.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from math import prod

import numpy as np

from commlib.dtypes import Array


def stand_in(name: str, shape: Sequence[int]) -> Array:
    """Return numbers for a weight of this name, and shape in the whole: the same in every run, on every rank.

    They are of a size that layers are initialised with, so that values stay of theirs; those of vectors and scalars are
    positive, for they may be scales, or exponents.
    """
    random = np.random.default_rng(zlib.crc32(name.encode()))
    found = random.uniform(0.25, 0.75, tuple(shape))
    if len(shape) > 1:
        found *= random.choice((-1.0, 1.0), tuple(shape)) / max(1, prod(shape[1:])) ** 0.5
    return found
