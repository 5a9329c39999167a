"""Constraints of Keras: of what is divided each rank constrains its part, where that is the part of the whole."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from commlib.errors import UsageError
from commlib.sharding.sharding import Sharding
from commlib.sharding.shards import part

_NORMS = (keras.constraints.MaxNorm, keras.constraints.MinMaxNorm, keras.constraints.UnitNorm)
_SCALES = (1e-3, 1, 1e3, 1e6)


def check_constraint(what: str, variable: Any, sharding: Sharding, size: int) -> None:
    """Raise UsageError for a constraint that would make something else of a part. One that is not Keras' is tried."""
    plain = variable.constraint
    if plain is None or size == 1 or _is_of_parts(plain, variable, sharding, size):
        return
    name = getattr(plain, "__name__", type(plain).__name__)
    raise UsageError(
        f"{what}: {variable.path} has a constraint, {name}, which would see this rank's part of dimension "
        f"{sharding.dim} alone: give it another axis=, or remove it"
    )


def _is_of_parts(plain: Any, variable: Any, sharding: Sharding, size: int) -> bool:
    if type(plain) is keras.constraints.NonNeg:
        return True
    if type(plain) in _NORMS:
        if plain.axis is None:
            return False
        dims = np.atleast_1d(plain.axis) % len(sharding.shape)
        return sharding.dim not in dims
    with tf.init_scope():
        try:
            return all(_is_tried(plain, variable.dtype, scale, sharding, size) for scale in _SCALES)
        except Exception:
            return False


def _is_tried(plain: Any, dtype: Any, scale: float, sharding: Sharding, size: int) -> bool:
    """Return whether a constraint makes of random numbers of a size, in parts, what it makes of the whole."""
    given = scale * np.random.default_rng(0).normal(size=sharding.shape)
    whole = np.asarray(tf.cast(plain(tf.cast(given, dtype)), tf.float64))
    for rank in range(size):
        own = np.asarray(tf.cast(plain(tf.cast(part(given, sharding, rank, size), dtype)), tf.float64))
        expected = part(whole, sharding, rank, size)
        if own.shape != expected.shape or not np.allclose(own, expected, rtol=1e-4, atol=0, equal_nan=True):
            return False
    return True
