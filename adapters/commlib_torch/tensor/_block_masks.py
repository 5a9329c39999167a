"""Block masks: the visible keys of a block, additive masks of its scores, and dropped weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import rshift
from typing import NamedTuple

import torch
from torch import Tensor

from commlib.context_parallel import Block, SequenceLayout
from commlib.context_parallel.attention import AttentionCall
from commlib.context_parallel.dropout import MIXING, hash_key, hash_number, keep_threshold, start_hashes
from commlib.context_parallel.sequences import positions


class DropoutBits(NamedTuple):
    """Hashes of rows, (batch, heads, queries), and of keys, from which each weight gets 32 random bits."""

    rows: Tensor
    keys: Tensor


@dataclass(frozen=True, slots=True)
class BlockMask:
    """The mask of a block. mask: (batch or 1, heads or 1, queries or 1, keys). bits: for dropout of a share `rate`."""

    block: Block
    mask: Tensor | None
    bits: DropoutBits | None
    rate: float

    def hide(self, scores: Tensor, rows: slice) -> Tensor:
        """Mask the scores of some queries, (batch, heads of keys, queries of each, rows, keys).

        keys: may be the first ones only, as in `drop`.
        """
        band = self.block.band
        if self.block.causal:
            band = -scores.shape[-1], 0
        if band is not None:
            offsets = torch.arange(scores.shape[-1], device=scores.device) - torch.arange(
                rows.start, rows.stop, device=scores.device
            ).unsqueeze(1)
            scores = scores.masked_fill_((offsets < band[0]) | (offsets > band[1]), -torch.inf)
        if self.mask is None:
            return scores
        mask = self.mask[..., : scores.shape[-1]]
        mask = group_by_keys(mask if mask.shape[2] == 1 else mask[:, :, rows], scores.shape[1])
        return scores.masked_fill_(~mask, -torch.inf) if mask.dtype is torch.bool else scores.add_(mask)

    def drop(self, weights: Tensor, rows: slice) -> Tensor:
        """Apply dropout to weights, or their gradients, of some queries: dropped ones are zeros, others scaled up."""
        if self.bits is None:
            return weights
        remaining = group_by_keys(
            _keep_mask(self.bits.rows[:, :, rows], self.bits.keys[: weights.shape[-1]], self.rate), weights.shape[1]
        )
        return weights * remaining * (1 / (1 - self.rate))


class BlockMasks:
    """The masks of a call's blocks. rank: the rank of the queries, among ranks that share the sequence by `layout`.

    mask: of these queries, over the keys of ranks 0, 1, ... q: the queries, of all heads from `first_head` on.
    """

    def __init__(
        self,
        call: AttentionCall,
        layout: SequenceLayout,
        rank: int,
        mask: Tensor | None,
        seed: int,
        q: Tensor,
        first_head: int,
    ) -> None:
        self._mask, self._rate, self._bits = mask, call.dropout, None
        self._starts = list(accumulate(layout.counts, initial=0))
        if call.dropout:
            keys = [torch.from_numpy(positions(layout, source)).to(q.device) for source in range(layout.size)]
            heads = torch.arange(first_head, first_head + q.shape[1], device=q.device)
            rows = torch.arange(q.shape[0], device=q.device).unsqueeze(1) * call.heads.queries + heads
            of_rows, of_keys = start_hashes(seed, rshift)
            rows = hash_number(hash_number(of_rows, rows, rshift).unsqueeze(-1), keys[rank], rshift)
            self._bits = DropoutBits(rows, hash_key(of_keys, torch.cat(keys), rshift))

    def of(self, block: Block, source: int) -> BlockMask | None:
        """Return the mask of a block with the keys of one rank; None if there is at most `causal`."""
        if self._mask is None and self._bits is None and block.band is None:
            return None
        keys = self.columns(block, source)
        mask = None if self._mask is None else narrow_mask(self._mask, block.queries)[..., keys]
        bits = (
            None
            if self._bits is None
            else DropoutBits(self._bits.rows[:, :, slice(*block.queries)], self._bits.keys[keys])
        )
        return BlockMask(block, mask, bits, self._rate)

    def columns(self, block: Block, source: int) -> slice:
        """Return the columns of a block's keys in a mask."""
        return slice(self._starts[source] + block.keys[0], self._starts[source] + block.keys[1])


def narrow_mask(mask: Tensor, queries: Sequence[int]) -> Tensor:
    """Return the rows of a mask for some queries."""
    return mask if mask.shape[2] == 1 else mask[:, :, slice(*queries)]


def group_by_keys(mask: Tensor, heads: int) -> Tensor:
    """Reshape (batch, heads or 1, queries, keys) to (batch, heads of keys or 1, queries' heads of each or 1, ...)."""
    return mask.unsqueeze(1) if mask.shape[1] == 1 else mask.unflatten(1, (heads, -1))


def _keep_mask(rows: Tensor, keys: Tensor, rate: float) -> Tensor:
    """Return `hash_number(rows, keys) >= least_kept(rate)` for each row and key, by 32-bit integers, in place.

    These are much faster; overflowing products keep the required low bits.
    """
    x = rows.to(torch.int32).unsqueeze(-1) ^ keys.to(torch.int32)
    for shift, factor in MIXING:
        x ^= (x >> shift) & ((1 << (32 - shift)) - 1)  # without the sign
        if factor:
            x *= factor - (factor >> 31 << 32)
    mask: Tensor = (x ^ -(1 << 31)) >= keep_threshold(rate) - (1 << 31)
    return mask
