"""Attention by all-to-all: each rank gets the whole sequence of some heads, and computes their attention locally."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import tensorflow as tf

from commlib.context_parallel import Block, SequenceLayout
from commlib.context_parallel.attention import AttentionCall
from commlib.sharding.axis import ParallelAxis
from commlib.tensor_parallel.moves import Redistribute, gather
from commlib_tensorflow._host_calls import result_empty
from commlib_tensorflow.tensor._block_masks import BlockMask
from commlib_tensorflow.tensor._blocks import attend, batch_of
from commlib_tensorflow.tensor._ring import RingCall, ring_attention
from commlib_tensorflow.tensor.moves import redistribute
from commlib_tensorflow.tensor.sequences import take_ranges


def attention_by_heads(
    q: tf.Tensor,
    k: tf.Tensor,
    v: tf.Tensor,
    mask: tf.Tensor | None,
    what: AttentionCall,
    layout: SequenceLayout,
    seed: Any,
) -> tf.Tensor:
    """Return attention. Queries, keys and values travel in one exchange, results in a second; a mask in its own.

    mask: of this rank's queries, over the keys of ranks 0, 1, ... Source: Jacobs et al., DeepSpeed Ulysses (2023),
    arXiv:2309.14509.
    """
    axis, heads, (_, _, tokens, width) = what.axis, what.heads, q.shape
    units, served, values, own = heads.units, heads.served, v.shape[-1], heads.lengths[what.axis.rank]
    of_queries = tf.transpose(tf.reshape(q, [*batch_of(q), units, served, tokens, width]), [0, 1, 3, 2, 4])
    of_queries = tf.reshape(of_queries, [*batch_of(q), units, tokens, served * width])
    of_keys = [tf.repeat(x, heads.copies, 1) for x in (k, v)]
    together = tf.concat([of_queries, *of_keys], -1)
    whole = redistribute(together, axis, Redistribute("all_to_all", 1, 2, heads.lengths, layout.counts))
    of_queries, k, v = tf.split(take_ranges(whole, layout.in_order, 2), [served * width, width, values], -1)
    q = tf.reshape(of_queries, [*batch_of(of_queries), own, layout.length, served, width])
    q = tf.reshape(tf.transpose(q, [0, 1, 3, 2, 4]), [*batch_of(q), own * served, layout.length, width])
    of_ranks = tuple(units * served for units in heads.lengths)
    if mask is not None:
        mask = take_ranges(
            take_ranges(_exchange_mask(mask, tokens, axis, of_ranks, layout), layout.in_order, 2), layout.in_order, 3
        )
    if what.is_plain or not own or not layout.length:
        out = _attend_locally(q, k, v, what, what.bounds(layout))
        if mask is not None and mask.dtype.is_floating:  # adds nothing, but keeps the mask's gradient connected
            out += tf.cast(tf.reduce_sum(mask), out.dtype)
    else:
        way = RingCall(SequenceLayout(layout.length, 1, "contiguous"), 0, seed, sum(of_ranks[: axis.rank]))
        out = ring_attention(q, k, v, mask, what, way)
    return redistribute(
        take_ranges(out, layout.by_rank, 2), axis, Redistribute("all_to_all", 2, 1, layout.counts, of_ranks)
    )


def _exchange_mask(
    mask: tf.Tensor, tokens: int, axis: ParallelAxis, heads: tuple[int, ...], layout: SequenceLayout
) -> tf.Tensor:
    """Return the mask of this rank's heads, for the queries of ranks 0, 1, ...

    Its gradient returns to the sending rank.
    """
    mask = tf.broadcast_to(mask, [*batch_of(mask), mask.shape[1], tokens, mask.shape[3]])
    numbers = tf.cast(mask, tf.uint8) if mask.dtype == tf.bool else mask
    plain = ParallelAxis(axis.comm, empty=result_empty)  # a codec must not round a mask
    if mask.shape[1] == 1:
        exchanged = redistribute(numbers, plain, gather(2, partial=True, lengths=layout.counts))
    else:
        exchanged = redistribute(numbers, plain, Redistribute("all_to_all", 1, 2, heads, layout.counts))
    return tf.cast(exchanged, tf.bool) if mask.dtype == tf.bool else exchanged


def _attend_locally(
    q: tf.Tensor, k: tf.Tensor, v: tf.Tensor, what: AttentionCall, bounds: tuple[int, ...]
) -> tf.Tensor:
    if not q.shape[1] or not q.shape[2]:  # keeps gradients connected: all ranks make the same calls
        return tf.repeat(v, what.heads.served, 1)
    parts = [
        attend(
            q[:, :, start:stop],
            k[:, :, start:stop],
            v[:, :, start:stop],
            what.scale,
            BlockMask(Block((0, stop - start), (0, stop - start), what.causal)),
        )[0]
        for start, stop in pairwise(bounds)
    ]
    return tf.cast(tf.concat(parts, 2), q.dtype)
