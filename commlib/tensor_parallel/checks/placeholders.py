"""Placeholders: values that replace an all-zero weight while numbers are compared.

Behind a gate that is zero at first, such as LoRA's second factor, right and wrong results are equal.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from math import prod

import numpy as np

from commlib.dtypes import Array


def make_placeholder(name: str, shape: Sequence[int]) -> Array:
    """Return values for a weight with this name and unsharded shape: the same in every run, on every rank.

    They have the magnitude of usual initialisations, so that activations keep theirs; vectors and scalars are
    positive, because they may be scales, or exponents.
    """
    random = np.random.default_rng(zlib.crc32(name.encode()))
    value = random.uniform(0.25, 0.75, tuple(shape))
    if len(shape) > 1:
        value *= random.choice((-1.0, 1.0), tuple(shape)) / max(1, prod(shape[1:])) ** 0.5
    return value
