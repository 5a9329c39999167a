"""Sight: which keys of a block its queries see, what is added to their scores, and which weights are dropped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import rshift
from typing import NamedTuple

import torch
from torch import Tensor

from commlib.context_parallel import Block, Layout
from commlib.context_parallel.attention import Attention
from commlib.context_parallel.dropping import MIXING, hashed, hashed_key, least_kept, started
from commlib.context_parallel.sequences import positions


class Bits(NamedTuple):
    """Hashes of rows, (batch, heads, queries), and of keys, of which 32 random bits for each weight are made."""

    rows: Tensor
    keys: Tensor


@dataclass(frozen=True, slots=True)
class Sight:
    """That of a block. mask: (batch or 1, heads or 1, queries or 1, keys). bits: of what is dropped, a share `rate`."""

    block: Block
    mask: Tensor | None
    bits: Bits | None
    rate: float

    def hide(self, scores: Tensor, rows: slice) -> Tensor:
        """Return the scores of some of the queries, (batch, heads of keys, queries of each, rows, keys), masked.

        keys: perhaps the first ones alone, as in `drop`.
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
        mask = by_keys(mask if mask.shape[2] == 1 else mask[:, :, rows], scores.shape[1])
        return scores.masked_fill_(~mask, -torch.inf) if mask.dtype is torch.bool else scores.add_(mask)

    def drop(self, weights: Tensor, rows: slice) -> Tensor:
        """Return weights, or their gradients, of some queries: zeros where they are dropped, the others larger."""
        if self.bits is None:
            return weights
        kept = by_keys(
            _kept(self.bits.rows[:, :, rows], self.bits.keys[: weights.shape[-1]], self.rate), weights.shape[1]
        )
        return weights * kept * (1 / (1 - self.rate))


class Sights:
    """Those of the blocks of a call. rank: the one whose queries these are, of ranks that have a sequence by `layout`.

    mask: of these queries, over the keys of ranks 0, 1, ... q: the queries, of all heads from `first_head` on.
    """

    def __init__(
        self, call: Attention, layout: Layout, rank: int, mask: Tensor | None, seed: int, q: Tensor, first_head: int
    ) -> None:
        self._mask, self._rate, self._bits = mask, call.dropout, None
        self._starts = list(accumulate(layout.counts, initial=0))
        if call.dropout:
            keys = [torch.from_numpy(positions(layout, source)).to(q.device) for source in range(layout.size)]
            heads = torch.arange(first_head, first_head + q.shape[1], device=q.device)
            rows = torch.arange(q.shape[0], device=q.device).unsqueeze(1) * call.heads.queries + heads
            of_rows, of_keys = started(seed, rshift)
            rows = hashed(hashed(of_rows, rows, rshift).unsqueeze(-1), keys[rank], rshift)
            self._bits = Bits(rows, hashed_key(of_keys, torch.cat(keys), rshift))

    def of(self, block: Block, source: int) -> Sight | None:
        """Return that of a block whose keys are a rank's; None if there is nothing but, perhaps, `causal`."""
        if self._mask is None and self._bits is None and block.band is None:
            return None
        keys = self.columns(block, source)
        mask = None if self._mask is None else narrowed(self._mask, block.queries)[..., keys]
        bits = None if self._bits is None else Bits(self._bits.rows[:, :, slice(*block.queries)], self._bits.keys[keys])
        return Sight(block, mask, bits, self._rate)

    def columns(self, block: Block, source: int) -> slice:
        """Return where the keys of a block are in a mask."""
        return slice(self._starts[source] + block.keys[0], self._starts[source] + block.keys[1])


def narrowed(mask: Tensor, queries: Sequence[int]) -> Tensor:
    """Return the part of a mask for some queries."""
    return mask if mask.shape[2] == 1 else mask[:, :, slice(*queries)]


def by_keys(mask: Tensor, heads: int) -> Tensor:
    """Return (batch, heads or 1, queries, keys) as (batch, heads of keys or 1, queries' heads of each or 1, ...)."""
    return mask.unsqueeze(1) if mask.shape[1] == 1 else mask.unflatten(1, (heads, -1))


def _kept(rows: Tensor, keys: Tensor, rate: float) -> Tensor:
    """Return `hashed(rows, keys) >= least_kept(rate)` for each row and key, by integers of 32 bits, in place.

    Those are quicker by far; products of theirs that overflow keep the bits that are asked for.
    """
    x = rows.to(torch.int32).unsqueeze(-1) ^ keys.to(torch.int32)
    for shift, factor in MIXING:
        x ^= (x >> shift) & ((1 << (32 - shift)) - 1)  # the sign does not come along
        if factor:
            x *= factor - (factor >> 31 << 32)
    found: Tensor = (x ^ -(1 << 31)) >= least_kept(rate) - (1 << 31)
    return found
