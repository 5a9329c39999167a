"""Sight: which keys of a block its queries see, what is added to their scores, and which weights are dropped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import tensorflow as tf

from commlib.context_parallel import Block, Layout
from commlib.context_parallel.attention import Attention
from commlib.context_parallel.dropping import hashed, hashed_key, least_kept, started
from commlib.context_parallel.sequences import positions


class Bits(NamedTuple):
    """Hashes of rows, (batch, heads, queries), and of keys, of which 32 random bits for each weight are made."""

    rows: tf.Tensor
    keys: tf.Tensor


@dataclass(frozen=True, slots=True)
class Sight:
    """That of a block. mask: (batch or 1, heads or 1, queries or 1, keys). bits: of what is dropped, a share `rate`."""

    block: Block
    mask: tf.Tensor | None = None
    bits: Bits | None = None
    rate: float = 0.0

    def hide(self, scores: tf.Tensor, served: int) -> tf.Tensor:
        """Return scores, (batch, heads of keys, queries of all heads that one serves, keys), masked."""
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
        mask = by_keys(self.mask, scores, served)
        return tf.where(mask, scores, hidden) if mask.dtype == tf.bool else scores + tf.cast(mask, scores.dtype)

    def drop(self, weights: tf.Tensor, served: int) -> tf.Tensor:
        """Return weights, or their gradients: zeros where they are dropped, the others larger."""
        if self.bits is None:
            return weights
        drawn = hashed(self.bits.rows[..., tf.newaxis], self.bits.keys, tf.bitwise.right_shift)
        kept = by_keys(drawn >= least_kept(self.rate), weights, served)
        return weights * tf.cast(kept, weights.dtype) * (1 / (1 - self.rate))


class Sights:
    """Those of the blocks of a call. rank: the one whose queries these are, of ranks that have a sequence by `layout`.

    mask: of these queries, over the keys of ranks 0, 1, ... q: the queries, of all heads from `first_head` on.
    """

    def __init__(
        self, call: Attention, layout: Layout, rank: int, mask: tf.Tensor | None, seed: Any, q: tf.Tensor,
        first_head: int,
    ) -> None:  # fmt: skip
        self._mask, self._rate, self._bits = mask, call.dropout, None
        self._starts = list(accumulate(layout.counts, initial=0))
        if call.dropout:
            keys = [tf.constant(positions(layout, source)) for source in range(layout.size)]
            heads = tf.range(first_head, first_head + q.shape[1], dtype=tf.int64)
            rows = tf.range(tf.shape(q, tf.int64)[0])[:, tf.newaxis] * call.heads.queries + heads
            shift = tf.bitwise.right_shift
            of_rows, of_keys = started(tf.cast(seed, tf.int64), shift)
            rows = hashed(hashed(of_rows, rows, shift)[..., tf.newaxis], keys[rank], shift)
            self._bits = Bits(rows, hashed_key(of_keys, tf.concat(keys, 0), shift))

    def of(self, block: Block, source: int) -> Sight:
        """Return that of a block whose keys are a rank's."""
        start, stop = self.columns(block, source)
        mask = None if self._mask is None else narrowed(self._mask, block.queries)[..., start:stop]
        bits = None
        if self._bits is not None:
            bits = Bits(self._bits.rows[:, :, slice(*block.queries)], self._bits.keys[start:stop])
        return Sight(block, mask, bits, self._rate)

    def columns(self, block: Block, source: int) -> tuple[int, int]:
        """Return where the keys of a block begin and end in a mask."""
        return self._starts[source] + block.keys[0], self._starts[source] + block.keys[1]


def narrowed(mask: tf.Tensor, queries: Sequence[int]) -> tf.Tensor:
    """Return the part of a mask for some queries."""
    return mask if mask.shape[2] == 1 else mask[:, :, slice(*queries)]


def by_keys(mask: tf.Tensor, scores: tf.Tensor, served: int) -> tf.Tensor:
    """Return (batch, heads or 1, queries or 1, keys) as it is broadcast to scores of heads of keys."""
    if served == 1:
        return mask
    batch, heads, rows, keys = tf.shape(mask)[0], mask.shape[1], mask.shape[2], mask.shape[3]
    if heads == 1:
        return mask if rows == 1 else tf.tile(mask, [1, 1, served, 1])
    tokens = scores.shape[-2] // served
    mask = tf.broadcast_to(mask, [batch, heads, tokens, keys])
    return tf.reshape(mask, [batch, heads // served, served * tokens, keys])
