"""Attention by all-to-all: each rank gets the whole sequence of some heads, and attends by itself."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import tensorflow as tf

from commlib.functional.attention import Attention
from commlib.tensor.context import Layout
from commlib.tensor.moves import Move
from commlib_tensorflow.tensor._blocks import attend, batch_of
from commlib_tensorflow.tensor.moves import moved


def attention_by_heads(q: tf.Tensor, k: tf.Tensor, v: tf.Tensor, what: Attention, layout: Layout) -> tf.Tensor:
    """Return attention. Queries, keys and values go in one exchange, results in another.

    Source: Jacobs et al., DeepSpeed Ulysses (2023), arXiv:2309.14509.
    """
    axis, heads, (_, _, tokens, width) = what.axis, what.heads, q.shape
    units, served, values, own = heads.units, heads.served, v.shape[-1], heads.lengths[what.axis.rank]
    of_queries = tf.transpose(tf.reshape(q, [*batch_of(q), units, served, tokens, width]), [0, 1, 3, 2, 4])
    of_queries = tf.reshape(of_queries, [*batch_of(q), units, tokens, served * width])
    of_keys = [tf.repeat(x, heads.copies, 1) for x in (k, v)]
    together = tf.concat([of_queries, *of_keys], -1)
    whole = moved(together, axis, Move("all_to_all", 1, 2, heads.lengths, layout.counts))
    of_queries, k, v = tf.split(taken(whole, layout.in_order, 2), [served * width, width, values], -1)
    q = tf.reshape(of_queries, [*batch_of(of_queries), own, layout.length, served, width])
    q = tf.reshape(tf.transpose(q, [0, 1, 3, 2, 4]), [*batch_of(q), own * served, layout.length, width])
    out = taken(_local(q, k, v, what, what.bounds(layout)), layout.by_rank, 2)
    back = Move("all_to_all", 2, 1, layout.counts, tuple(units * served for units in heads.lengths))
    return moved(out, axis, back)


def taken(x: tf.Tensor, ranges: Sequence[range], dim: int) -> tf.Tensor:
    """Return the rows in these ranges along `dim`, one behind another."""
    if len(ranges) == 1 and len(ranges[0]) == x.shape[dim]:
        return x
    front = (slice(None),) * dim
    parts = [x[(*front, slice(part.start, part.stop))] for part in ranges]
    return tf.concat(parts, dim) if parts else x[(*front, slice(0, 0))]


def _local(q: tf.Tensor, k: tf.Tensor, v: tf.Tensor, what: Attention, bounds: tuple[int, ...]) -> tf.Tensor:
    if not q.shape[1] or not q.shape[2]:  # what has no elements keeps its place among gradients: all call the same
        return tf.repeat(v, what.heads.served, 1)
    parts = [
        attend(q[:, :, start:stop], k[:, :, start:stop], v[:, :, start:stop], what.scale, what.causal)[0]
        for start, stop in pairwise(bounds)
    ]
    return tf.cast(tf.concat(parts, 2), q.dtype)
