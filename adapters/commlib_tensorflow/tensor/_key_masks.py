"""Attention masks: combine the masks of queries and of keys into one, over the keys of ranks 0, 1, ..."""

from __future__ import annotations

import tensorflow as tf

from commlib.context_parallel import SequenceLayout
from commlib.sharding.axis import ParallelAxis
from commlib.tensor_parallel.moves import gather
from commlib_tensorflow._host_calls import result_empty
from commlib_tensorflow.tensor._row_ranges import take_ranges
from commlib_tensorflow.tensor.moves import redistribute


def whole_mask(
    mask: tf.Tensor | None, key_mask: tf.Tensor | None, axis: ParallelAxis, layout: SequenceLayout
) -> tf.Tensor | None:
    """Return the mask of this rank's queries, with four dimensions, or None. Collective if there is a mask of keys."""
    found = None
    if mask is not None:
        found = take_ranges(mask[(tf.newaxis,) * (4 - mask.shape.rank)], layout.by_rank, 3)
    if key_mask is None:
        return found
    plain = ParallelAxis(axis.comm, empty=result_empty)
    keys = tf.cast(redistribute(tf.cast(key_mask, tf.uint8), plain, gather(1, lengths=layout.counts)), tf.bool)
    keys = keys[:, tf.newaxis, tf.newaxis]
    if found is None:
        return keys
    return found & keys if found.dtype == tf.bool else tf.where(keys, found, tf.constant(-float("inf"), found.dtype))
