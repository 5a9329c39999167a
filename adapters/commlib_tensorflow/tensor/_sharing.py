"""Sharing: weights of which several ranks have the same part, such as heads of keys that are fewer than the ranks."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from commlib.sharding.sharers import Sharers
from commlib_tensorflow._bridge import as_tensor
from commlib_tensorflow.tensor.moves import copy


def for_sharers(sharers: Sharers, weight: Any, dim: int) -> Any:
    """Return a weight whose gradient is added up over the ranks that share it, or parts of it along a dimension."""
    if not sharers:
        return weight
    pieces = tf.split(as_tensor(weight), [length for length, _ in sharers], dim)
    copied = [one if axis is None else copy(one, axis) for one, (_, axis) in zip(pieces, sharers, strict=True)]
    return copied[0] if len(copied) == 1 else tf.concat(copied, dim)
