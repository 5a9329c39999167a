"""Attention by all-to-all: each rank gets the whole sequence of some heads, and attends by itself."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from commlib.context_parallel import Layout
from commlib.context_parallel.attention import Attention
from commlib.sharding.axis import Axis
from commlib.tensor_parallel.moves import Move, gather
from commlib_torch.tensor._ring import Way, ring_attention
from commlib_torch.tensor._taken import taken
from commlib_torch.tensor.moves import moved


def attention_by_heads(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, call: Attention, layout: Layout, seed: int
) -> Tensor:
    """Return attention. Queries, keys and values go in one exchange, results in another; a mask in one of its own.

    mask: of this rank's queries, over the keys of ranks 0, 1, ...

    Source: Jacobs et al., DeepSpeed Ulysses (2023), arXiv:2309.14509.
    """
    axis, heads, (batch, _, tokens, width) = call.axis, call.heads, q.shape
    of_queries = q.reshape(batch, heads.units, heads.served, tokens, width).transpose(2, 3).flatten(3)
    of_keys = (x.repeat_interleave(heads.copies, 1) for x in (k, v))
    together = torch.cat((of_queries, *of_keys), -1)
    whole = moved(together, axis, Move("all_to_all", 1, 2, heads.lengths, layout.counts))
    of_queries, k, v = taken(whole, layout.in_order, 2).split((heads.served * width, width, v.shape[-1]), -1)
    q = of_queries.unflatten(3, (heads.served, width)).transpose(2, 3).flatten(1, 2)
    own = tuple(units * heads.served for units in heads.lengths)
    if mask is not None:
        mask = taken(taken(_of_heads(mask, tokens, axis, own, layout), layout.in_order, 2), layout.in_order, 3)
    if call.is_plain or not q.numel():
        out = _local(q, k, v, call, call.bounds(layout))
        if mask is not None and mask.is_floating_point():  # it has its place among gradients, too: nothing is added up
            out = out + mask.sum().to(out.dtype)
    else:
        way = Way(Layout(layout.length, 1, "contiguous"), 0, seed, sum(own[: axis.rank]))
        out = ring_attention(q, k, v, mask, call, way)
    out = taken(out, layout.by_rank, 2)
    return moved(out, axis, Move("all_to_all", 2, 1, layout.counts, own))


def _of_heads(mask: Tensor, tokens: int, axis: Axis, heads: Sequence[int], layout: Layout) -> Tensor:
    """Return the mask of this rank's heads, of the queries of ranks 0, 1, ... Its gradient goes where it came from."""
    mask = mask.expand(-1, -1, tokens, -1)
    sent = mask.byte() if mask.dtype is torch.bool else mask
    plain = Axis(axis.comm)  # what hides a key is not to be rounded by a codec
    if mask.shape[1] == 1:
        found = moved(sent, plain, gather(2, partial=True, lengths=layout.counts))
    else:
        found = moved(sent, plain, Move("all_to_all", 1, 2, tuple(heads), layout.counts))
    return found.bool() if mask.dtype is torch.bool else found


def _local(q: Tensor, k: Tensor, v: Tensor, call: Attention, bounds: tuple[int, ...]) -> Tensor:
    served = call.heads.served
    if not q.numel():
        # What has no elements has its place among gradients, so that all ranks call the same; and a product saves a
        # tensor, as attention does: a checkpoint recomputes when the first one is needed, on all ranks at once.
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
