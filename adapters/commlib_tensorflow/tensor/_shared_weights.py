"""Shared weights: several ranks have the same part, such as key heads when there are fewer than ranks."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from commlib.sharding.shard_sharing import Sharers
from commlib_tensorflow._bridge import as_tensor
from commlib_tensorflow.tensor.moves import copy


def sum_shared_gradient(sharers: Sharers, weight: Any, dim: int) -> Any:
    """Return a weight whose gradient is summed over the ranks that share it, or share parts of it along a dimension."""
    if not sharers:
        return weight
    pieces = tf.split(as_tensor(weight), [length for length, _ in sharers], dim)
    copied = [one if axis is None else copy(one, axis) for one, (_, axis) in zip(pieces, sharers, strict=True)]
    return copied[0] if len(copied) == 1 else tf.concat(copied, dim)
