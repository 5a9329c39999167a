"""Masked attention over a block, with hidden keys or dropout, by matrix products.

A `BlockMask` provides masks and dropout. Otherwise like `MatmulAttention`, with the score statistics of
`commlib.context_parallel.ring`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from commlib_torch.tensor._block_masks import BlockMask

_MOST_SCORES = 1 << 24
"""Maximum number of score elements in memory."""
_CAUSAL_ROWS = 256
"""Queries of a causal block that are computed at a time: with all of them, half of the scores would be wasted."""


def masked_forward(q: Tensor, k: Tensor, v: Tensor, sight: BlockMask, scale: float) -> tuple[Tensor, Tensor]:
    """Return the softmax of these keys' scores times their values, and stats; zeros for queries that see no key."""
    kind = torch.promote_types(q.dtype, torch.float32)
    of_keys, values = (x.to(kind).unsqueeze(2) for x in (k, v))
    out = torch.empty((*q.shape[:-1], v.shape[-1]), dtype=kind, device=q.device)
    stats = torch.empty((*q.shape[:-1], 2), dtype=kind, device=q.device)
    for rows, keys in _pieces(q, k, sight):
        scores = _scores(q[:, :, rows].to(kind), of_keys[..., keys, :], sight, rows, scale)
        most = scores.amax(-1, keepdim=True)
        weights = torch.exp(scores - make_finite(most))
        total = weights.sum(-1, keepdim=True)
        output = sight.drop(weights, rows) @ values[..., keys, :] / total.clamp(min=1)
        out[:, :, rows] = output.flatten(1, 2)
        stats[:, :, rows] = torch.cat((most, total), -1).flatten(1, 2)
    return out, stats


def masked_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, stats: Tensor, sight: BlockMask, scale: float,
    of_mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, k and v for the contribution of these keys; `out` and `stats` are over all keys.

    of_mask: the gradient of the block's mask, to which this contribution is added.
    """
    heads, kind = (k.shape[1], q.shape[1] // k.shape[1]), torch.promote_types(q.dtype, torch.float32)
    of_keys, values = (x.to(kind).unsqueeze(2) for x in (k, v))
    of_q = torch.empty_like(q, dtype=kind)
    of_k, of_v = torch.zeros_like(k, dtype=kind), torch.zeros_like(v, dtype=kind)
    for rows, keys in _pieces(q, k, sight):
        mine, result, given = (x[:, :, rows].to(kind) for x in (q, out, gradient))
        scores = _scores(mine, of_keys[..., keys, :], sight, rows, scale)
        most, total = stats[:, :, rows].unflatten(1, heads).split(1, -1)
        weights = torch.exp(scores - make_finite(most)) / total.clamp(min=1)
        of_result = given.unflatten(1, heads)
        products = (given * result).sum(-1, keepdim=True).unflatten(1, heads)
        of_scores = weights * (sight.drop(of_result @ values[..., keys, :].mT, rows) - products)
        if of_mask is not None:
            part = of_mask[..., keys] if of_mask.shape[2] == 1 else of_mask[:, :, rows, keys]
            part += of_scores.flatten(1, 2).sum_to_size(part.shape)
        of_scores *= scale
        of_q[:, :, rows] = (of_scores @ of_keys[..., keys, :]).flatten(1, 2)
        of_k[:, :, keys] += (of_scores.mT @ mine.unflatten(1, heads)).sum(2)
        of_v[:, :, keys] += (sight.drop(weights, rows).mT @ of_result).sum(2)
    return of_q, of_k, of_v


def make_finite(most: Tensor) -> Tensor:
    """Replace largest scores of -inf by the least finite number: differences from it are then not NaN."""
    return most.clamp(min=torch.finfo(most.dtype).min)


def _pieces(q: Tensor, k: Tensor, sight: BlockMask) -> list[tuple[slice, slice]]:
    """Yield queries and the keys they see: of a causal block the first keys."""
    batch, heads, queries = q.shape[:3]
    length = max(1, _MOST_SCORES // max(1, batch * heads * k.shape[2]))
    if sight.block.causal:
        length = min(length, _CAUSAL_ROWS)
    rows = [slice(start, min(start + length, queries)) for start in range(0, queries, length)]
    return [(part, slice(0, part.stop if sight.block.causal else k.shape[2])) for part in rows]


def _scores(q: Tensor, k: Tensor, sight: BlockMask, rows: slice, scale: float) -> Tensor:
    """Return (batch, heads of keys, queries for each, rows, keys)."""
    return sight.hide(q.unflatten(1, (k.shape[1], -1)) @ k.mT * scale, rows)
