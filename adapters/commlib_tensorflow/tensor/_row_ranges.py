"""Row ranges: take ranges of rows of tensors."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf


def take_ranges(x: tf.Tensor, ranges: Sequence[range], dim: int) -> tf.Tensor:
    """Return the rows in these ranges along `dim`, concatenated."""
    if len(ranges) == 1 and len(ranges[0]) == x.shape[dim]:
        return x
    front = (slice(None),) * dim
    parts = [x[(*front, slice(part.start, part.stop))] for part in ranges]
    return tf.concat(parts, dim) if parts else x[(*front, slice(0, 0))]
