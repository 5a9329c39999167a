"""Attention by all-to-all: each rank gets the whole sequence of some heads, and attends by itself."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from commlib.functional.attention import Attention
from commlib.tensor.context import Layout
from commlib.tensor.moves import Move
from commlib_torch.tensor.moves import moved


def attention_by_heads(q: Tensor, k: Tensor, v: Tensor, call: Attention, layout: Layout) -> Tensor:
    """Return attention. Queries, keys and values go in one exchange, results in another.

    Source: Jacobs et al., DeepSpeed Ulysses (2023), arXiv:2309.14509.
    """
    axis, heads, (batch, _, tokens, width) = call.axis, call.heads, q.shape
    of_queries = q.reshape(batch, heads.units, heads.served, tokens, width).transpose(2, 3).flatten(3)
    of_keys = (x.repeat_interleave(heads.copies, 1) for x in (k, v))
    together = torch.cat((of_queries, *of_keys), -1)
    whole = moved(together, axis, Move("all_to_all", 1, 2, heads.lengths, layout.counts))
    of_queries, k, v = taken(whole, layout.in_order, 2).split((heads.served * width, width, v.shape[-1]), -1)
    q = of_queries.unflatten(3, (heads.served, width)).transpose(2, 3).flatten(1, 2)
    out = taken(_local(q, k, v, call, call.bounds(layout)), layout.by_rank, 2)
    own = tuple(units * heads.served for units in heads.lengths)
    return moved(out, axis, Move("all_to_all", 2, 1, layout.counts, own))


def taken(x: Tensor, ranges: Sequence[range], dim: int) -> Tensor:
    """Return the rows in these ranges along `dim`, one behind another."""
    if len(ranges) == 1 and len(ranges[0]) == x.shape[dim]:
        return x
    parts = [x.narrow(dim, part.start, len(part)) for part in ranges]
    return torch.cat(parts, dim) if parts else x.narrow(dim, 0, 0)


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
