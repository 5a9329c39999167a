"""Attention of some heads: masks for this rank's heads, and scaled products with dropout from its own stream."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from commlib.errors import UsageError
from commlib.schedule.layout import even
from commlib.sharding.axis import Axis
from commlib_torch._uncompiled import uncompiled
from commlib_torch.tensor.moves import copy
from commlib_torch.tensor.streams import divided


@uncompiled
def attended(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, rate: float, causal: bool, axis: Axis) -> Tensor:
    """Return F.scaled_dot_product_attention of this rank's heads: (batch, heads, tokens, features of a head).

    Where k and v have fewer heads, each of theirs serves as many neighbouring ones of q. rate: of dropout.
    """
    options: dict[str, Any] = {"attn_mask": mask, "is_causal": causal, "enable_gqa": q.shape[1] != k.shape[1]}
    if not rate:
        return F.scaled_dot_product_attention(q, k, v, **options)
    with divided(axis, q.device):
        return F.scaled_dot_product_attention(q, k, v, dropout_p=rate, **options)


def mask_of(
    attention: Tensor | None, padding: Tensor | None, like: Tensor, keys: int, extra: int, axis: Axis, heads: int
) -> Tensor | None:
    """Return what is added to scores: the masks of `nn.MultiheadAttention`, as one for this rank of all `heads`.

    like: q, (batch, this rank's heads, queries, ...). keys: how many the masks know; `extra` ones behind them are seen.
    """
    batch, _, queries, _ = like.shape
    found: Tensor | None = None
    shape: tuple[int, ...]
    if attention is not None:
        shape = (queries, keys) if attention.dim() == 2 else (batch * heads, queries, keys)
        found = _added("attn_mask", attention, shape, like, axis)
        if attention.dim() == 2:
            found = found.reshape(1, 1, queries, keys)
        else:
            own = slice(*even(heads, axis.size).slice_of(axis.rank))
            found = found.reshape(batch, heads, queries, keys)[:, own]
    if padding is not None:
        shape = (batch, keys)[padding.dim() == 1 :]
        added = _added("key_padding_mask", padding, shape, like, axis).reshape(-1, 1, 1, keys)
        found = added if found is None else found + added
    return F.pad(found, (0, extra)) if found is not None and extra else found


def _added(what: str, mask: Tensor, expected: tuple[int, ...], like: Tensor, axis: Axis) -> Tensor:
    if mask.shape != expected:
        raise UsageError(f"ColumnAttention: {what} has shape {list(mask.shape)}, expected {list(expected)}")
    if mask.is_floating_point():
        # A mask that is learned, as a bias of positions may be, serves the heads of all ranks.
        return (copy(mask, axis) if mask.requires_grad else mask).to(like.dtype)
    if mask.dtype is not torch.bool:
        raise UsageError(f"ColumnAttention: {what} has dtype {mask.dtype}, expected bool or a floating one")
    return like.new_zeros(mask.shape).masked_fill_(mask, float("-inf"))
