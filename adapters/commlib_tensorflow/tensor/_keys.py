"""Masks of a call of attention: that of queries and that of keys as one, over the keys of ranks 0, 1, ..."""

from __future__ import annotations

import tensorflow as tf

from commlib.context_parallel import Layout
from commlib.sharding.axis import Axis
from commlib.tensor_parallel.moves import gather
from commlib_tensorflow._graph import result_empty
from commlib_tensorflow.tensor._taken import taken
from commlib_tensorflow.tensor.moves import moved


def whole_mask(mask: tf.Tensor | None, key_mask: tf.Tensor | None, axis: Axis, layout: Layout) -> tf.Tensor | None:
    """Return the mask of this rank's queries, with four dimensions, or None. Collective, if there is one of keys."""
    found = None
    if mask is not None:
        found = taken(mask[(tf.newaxis,) * (4 - mask.shape.rank)], layout.by_rank, 3)
    if key_mask is None:
        return found
    plain = Axis(axis.comm, empty=result_empty)
    keys = tf.cast(moved(tf.cast(key_mask, tf.uint8), plain, gather(1, lengths=layout.counts)), tf.bool)
    keys = keys[:, tf.newaxis, tf.newaxis]
    if found is None:
        return keys
    return found & keys if found.dtype == tf.bool else tf.where(keys, found, tf.constant(-float("inf"), found.dtype))
