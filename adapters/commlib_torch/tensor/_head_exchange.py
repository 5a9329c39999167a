"""Attention by all-to-all: each rank gets the full sequence of some heads, and computes their attention locally."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from commlib.context_parallel import SequenceLayout
from commlib.context_parallel.attention import AttentionCall
from commlib.sharding.axis import ParallelAxis
from commlib.tensor_parallel.moves import Redistribute, gather
from commlib_torch.tensor._ring import RingCall, ring_attention
from commlib_torch.tensor.moves import redistribute
from commlib_torch.tensor.sequences import take_ranges


def attention_by_heads(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, call: AttentionCall, layout: SequenceLayout, seed: int
) -> Tensor:
    """Return attention. Queries, keys and values share one all-to-all; the results have a second; a mask has its own.

    mask: of this rank's queries, over the keys of ranks 0, 1, ...

    Source: Jacobs et al., DeepSpeed Ulysses (2023), arXiv:2309.14509.
    """
    axis, heads, (batch, _, tokens, width) = call.axis, call.heads, q.shape
    of_queries = q.reshape(batch, heads.units, heads.served, tokens, width).transpose(2, 3).flatten(3)
    of_keys = (x.repeat_interleave(heads.copies, 1) for x in (k, v))
    together = torch.cat((of_queries, *of_keys), -1)
    whole = redistribute(together, axis, Redistribute("all_to_all", 1, 2, heads.lengths, layout.counts))
    of_queries, k, v = take_ranges(whole, layout.in_order, 2).split((heads.served * width, width, v.shape[-1]), -1)
    q = of_queries.unflatten(3, (heads.served, width)).transpose(2, 3).flatten(1, 2)
    own = tuple(units * heads.served for units in heads.lengths)
    if mask is not None:
        mask = take_ranges(
            take_ranges(_exchange_mask(mask, tokens, axis, own, layout), layout.in_order, 2), layout.in_order, 3
        )
    if call.is_plain or not q.numel():
        out = _local(q, k, v, call, call.bounds(layout))
        if mask is not None and mask.is_floating_point():  # gradients need it, too: nothing is summed
            out = out + mask.sum().to(out.dtype)
    else:
        way = RingCall(SequenceLayout(layout.length, 1, "contiguous"), 0, seed, sum(own[: axis.rank]))
        out = ring_attention(q, k, v, mask, call, way)
    out = take_ranges(out, layout.by_rank, 2)
    return redistribute(out, axis, Redistribute("all_to_all", 2, 1, layout.counts, own))


def _exchange_mask(
    mask: Tensor, tokens: int, axis: ParallelAxis, heads: Sequence[int], layout: SequenceLayout
) -> Tensor:
    """Return the mask of this rank's heads, for the queries of ranks 0, 1, ... Its gradient returns to its rank."""
    mask = mask.expand(-1, -1, tokens, -1)
    numbers = mask.byte() if mask.dtype is torch.bool else mask
    plain = ParallelAxis(axis.comm)  # a codec must not round values that hide keys
    if mask.shape[1] == 1:
        exchanged = redistribute(numbers, plain, gather(2, partial=True, lengths=layout.counts))
    else:
        exchanged = redistribute(numbers, plain, Redistribute("all_to_all", 1, 2, tuple(heads), layout.counts))
    return exchanged.bool() if mask.dtype is torch.bool else exchanged


def _local(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, bounds: tuple[int, ...]) -> Tensor:
    served = call.heads.served
    if not q.numel():
        # Without elements, the gradients still include this node, so that all ranks make the same calls. The product
        # saves a tensor, like attention: a checkpoint recomputes when the first one is needed, on all ranks at once.
        return (v * v).repeat_interleave(served, 1)
    parts = [
        scaled_dot_product_attention(
            q[:, :, start:stop],
            k[:, :, start:stop],
            v[:, :, start:stop],
            is_causal=call.causal,
            scale=call.scale,
            enable_gqa=served > 1,
        )
        for start, stop in pairwise(bounds)
    ]
    return torch.cat(parts, 2)
