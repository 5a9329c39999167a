"""Block masks: which keys of a block its queries see, the values added to their scores, and the dropped weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import tensorflow as tf

from commlib.context_parallel import Block, SequenceLayout
from commlib.context_parallel.attention import AttentionCall
from commlib.context_parallel.dropout import hash_key, hash_number, keep_threshold, start_hashes
from commlib.context_parallel.sequences import positions


class DropoutBits(NamedTuple):
    """Hashes of rows, (batch, heads, queries), and of keys, which give 32 random bits for each weight."""

    rows: tf.Tensor
    keys: tf.Tensor


@dataclass(frozen=True, slots=True)
class BlockMask:
    """Mask of one block. mask: (batch or 1, heads or 1, queries or 1, keys). bits: for dropout with rate `rate`."""

    block: Block
    mask: tf.Tensor | None = None
    bits: DropoutBits | None = None
    rate: float = 0.0

    def hide(self, scores: tf.Tensor, served: int) -> tf.Tensor:
        """Return masked scores, (batch, heads of keys, queries of all heads that share a head of keys, keys)."""
        band, keys = self.block.band, scores.shape[-1]
        if self.block.causal:
            band = -keys, 0
        hidden = tf.constant(-float("inf"), scores.dtype)
        if band is not None:
            offsets = tf.range(keys) - tf.range(scores.shape[-2] // served)[:, tf.newaxis]
            seen = (offsets >= band[0]) & (offsets <= band[1])
            scores = tf.where(tf.tile(seen, [served, 1]), scores, hidden)
        if self.mask is None:
            return scores
        mask = group_by_keys(self.mask, scores, served)
        return tf.where(mask, scores, hidden) if mask.dtype == tf.bool else scores + tf.cast(mask, scores.dtype)

    def drop(self, weights: tf.Tensor, served: int) -> tf.Tensor:
        """Return weights, or their gradients, after dropout: dropped ones are zeros, the others are scaled up."""
        if self.bits is None:
            return weights
        random = hash_number(self.bits.rows[..., tf.newaxis], self.bits.keys, tf.bitwise.right_shift)
        remaining = group_by_keys(random >= keep_threshold(self.rate), weights, served)
        return weights * tf.cast(remaining, weights.dtype) * (1 / (1 - self.rate))


class BlockMasks:
    """Masks of the blocks of a call. rank: the rank of the queries, in the layout of the sequence.

    mask: of these queries, over the keys of ranks 0, 1, ... q: the queries, of all heads from `first_head` on.
    """

    def __init__(
        self, call: AttentionCall, layout: SequenceLayout, rank: int, mask: tf.Tensor | None, seed: Any, q: tf.Tensor,
        first_head: int,
    ) -> None:  # fmt: skip
        self._mask, self._rate, self._bits = mask, call.dropout, None
        self._starts = list(accumulate(layout.counts, initial=0))
        if call.dropout:
            keys = [tf.constant(positions(layout, source)) for source in range(layout.size)]
            heads = tf.range(first_head, first_head + q.shape[1], dtype=tf.int64)
            rows = tf.range(tf.shape(q, tf.int64)[0])[:, tf.newaxis] * call.heads.queries + heads
            shift = tf.bitwise.right_shift
            of_rows, of_keys = start_hashes(tf.cast(seed, tf.int64), shift)
            rows = hash_number(hash_number(of_rows, rows, shift)[..., tf.newaxis], keys[rank], shift)
            self._bits = DropoutBits(rows, hash_key(of_keys, tf.concat(keys, 0), shift))

    def of(self, block: Block, source: int) -> BlockMask:
        """Return the mask of the block with the keys of rank `source`."""
        start, stop = self.columns(block, source)
        mask = None if self._mask is None else narrow_mask(self._mask, block.queries)[..., start:stop]
        bits = None
        if self._bits is not None:
            bits = DropoutBits(self._bits.rows[:, :, slice(*block.queries)], self._bits.keys[start:stop])
        return BlockMask(block, mask, bits, self._rate)

    def columns(self, block: Block, source: int) -> tuple[int, int]:
        """Return the start and end of a block's keys in a mask."""
        return self._starts[source] + block.keys[0], self._starts[source] + block.keys[1]


def narrow_mask(mask: tf.Tensor, queries: Sequence[int]) -> tf.Tensor:
    """Return the part of a mask for some queries."""
    return mask if mask.shape[2] == 1 else mask[:, :, slice(*queries)]


def group_by_keys(mask: tf.Tensor, scores: tf.Tensor, served: int) -> tf.Tensor:
    """Return (batch, heads or 1, queries or 1, keys) in a shape that broadcasts to scores per head of keys."""
    if served == 1:
        return mask
    batch, heads, rows, keys = tf.shape(mask)[0], mask.shape[1], mask.shape[2], mask.shape[3]
    if heads == 1:
        return mask if rows == 1 else tf.tile(mask, [1, 1, served, 1])
    tokens = scores.shape[-2] // served
    mask = tf.broadcast_to(mask, [batch, heads, tokens, keys])
    return tf.reshape(mask, [batch, heads // served, served * tokens, keys])
