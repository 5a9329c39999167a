"""Rows of tensors, taken in another order."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf


def taken(x: tf.Tensor, ranges: Sequence[range], dim: int) -> tf.Tensor:
    """Return the rows in these ranges along `dim`, one behind another."""
    if len(ranges) == 1 and len(ranges[0]) == x.shape[dim]:
        return x
    front = (slice(None),) * dim
    parts = [x[(*front, slice(part.start, part.stop))] for part in ranges]
    return tf.concat(parts, dim) if parts else x[(*front, slice(0, 0))]
