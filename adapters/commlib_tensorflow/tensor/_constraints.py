"""Constraints of Keras on sharded variables: each rank constrains its shard, if that equals the shard of the result."""

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
    """Raise UsageError for a constraint whose result on a shard would differ. One that is not Keras' own is tried."""
    plain = variable.constraint
    if plain is None or size == 1 or _commutes(plain, variable, sharding, size):
        return
    name = getattr(plain, "__name__", type(plain).__name__)
    raise UsageError(
        f"{what}: {variable.path} has a constraint, {name}, which would see only this rank's shard of dimension "
        f"{sharding.dim}: give it another axis=, or remove it"
    )


def _commutes(plain: Any, variable: Any, sharding: Sharding, size: int) -> bool:
    if type(plain) is keras.constraints.NonNeg:
        return True
    if type(plain) in _NORMS:
        if plain.axis is None:
            return False
        dims = np.atleast_1d(plain.axis) % len(sharding.shape)
        return sharding.dim not in dims
    with tf.init_scope():
        try:
            return all(_agrees_on_shards(plain, variable.dtype, scale, sharding, size) for scale in _SCALES)
        except Exception:
            return False


def _agrees_on_shards(plain: Any, dtype: Any, scale: float, sharding: Sharding, size: int) -> bool:
    """Return whether a constraint of random shards equals the shards of the constraint of the full array."""
    given = scale * np.random.default_rng(0).normal(size=sharding.shape)
    whole = np.asarray(tf.cast(plain(tf.cast(given, dtype)), tf.float64))
    for rank in range(size):
        own = np.asarray(tf.cast(plain(tf.cast(part(given, sharding, rank, size), dtype)), tf.float64))
        expected = part(whole, sharding, rank, size)
        if own.shape != expected.shape or not np.allclose(own, expected, rtol=1e-4, atol=0, equal_nan=True):
            return False
    return True
