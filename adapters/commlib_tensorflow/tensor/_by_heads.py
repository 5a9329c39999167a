"""Attention by all-to-all: each rank gets the whole sequence of some heads, and attends by itself."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import tensorflow as tf

from commlib.context_parallel import Block, Layout
from commlib.context_parallel.attention import Attention
from commlib.sharding.axis import Axis
from commlib.tensor_parallel.moves import Move, gather
from commlib_tensorflow._graph import result_empty
from commlib_tensorflow.tensor._blocks import attend, batch_of
from commlib_tensorflow.tensor._ring import Way, ring_attention
from commlib_tensorflow.tensor._sight import Sight
from commlib_tensorflow.tensor._taken import taken
from commlib_tensorflow.tensor.moves import moved


def attention_by_heads(
    q: tf.Tensor, k: tf.Tensor, v: tf.Tensor, mask: tf.Tensor | None, what: Attention, layout: Layout, seed: Any
) -> tf.Tensor:
    """Return attention. Queries, keys and values go in one exchange, results in another; a mask in one of its own.

    mask: of this rank's queries, over the keys of ranks 0, 1, ...

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
    of_ranks = tuple(units * served for units in heads.lengths)
    if mask is not None:
        mask = taken(taken(_of_heads(mask, tokens, axis, of_ranks, layout), layout.in_order, 2), layout.in_order, 3)
    if what.is_plain or not own or not layout.length:
        out = _local(q, k, v, what, what.bounds(layout))
        if mask is not None and mask.dtype.is_floating:  # it has its place among gradients, too: nothing is added up
            out += tf.cast(tf.reduce_sum(mask), out.dtype)
    else:
        way = Way(Layout(layout.length, 1, "contiguous"), 0, seed, sum(of_ranks[: axis.rank]))
        out = ring_attention(q, k, v, mask, what, way)
    return moved(taken(out, layout.by_rank, 2), axis, Move("all_to_all", 2, 1, layout.counts, of_ranks))


def _of_heads(mask: tf.Tensor, tokens: int, axis: Axis, heads: tuple[int, ...], layout: Layout) -> tf.Tensor:
    """Return the mask of this rank's heads, of the queries of ranks 0, 1, ... Its gradient goes where it came from."""
    mask = tf.broadcast_to(mask, [*batch_of(mask), mask.shape[1], tokens, mask.shape[3]])
    sent = tf.cast(mask, tf.uint8) if mask.dtype == tf.bool else mask
    plain = Axis(axis.comm, empty=result_empty)  # what hides a key is not to be rounded by a codec
    if mask.shape[1] == 1:
        found = moved(sent, plain, gather(2, partial=True, lengths=layout.counts))
    else:
        found = moved(sent, plain, Move("all_to_all", 1, 2, heads, layout.counts))
    return tf.cast(found, tf.bool) if mask.dtype == tf.bool else found


def _local(q: tf.Tensor, k: tf.Tensor, v: tf.Tensor, what: Attention, bounds: tuple[int, ...]) -> tf.Tensor:
    if not q.shape[1] or not q.shape[2]:  # what has no elements keeps its place among gradients: all call the same
        return tf.repeat(v, what.heads.served, 1)
    parts = [
        attend(
            q[:, :, start:stop],
            k[:, :, start:stop],
            v[:, :, start:stop],
            what.scale,
            Sight(Block((0, stop - start), (0, stop - start), what.causal)),
        )[0]
        for start, stop in pairwise(bounds)
    ]
    return tf.cast(tf.concat(parts, 2), q.dtype)
