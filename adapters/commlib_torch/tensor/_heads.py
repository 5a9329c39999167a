"""Attention of some heads: masks for this rank's heads, and scaled dot products with this rank's dropout stream."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from commlib.errors import UsageError
from commlib.schedule.layout import even
from commlib.sharding.axis import ParallelAxis
from commlib_torch._graph_breaks import disable_compile
from commlib_torch.tensor.moves import copy
from commlib_torch.tensor.streams import divided


@disable_compile
def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, rate: float, causal: bool, axis: ParallelAxis
) -> Tensor:
    """Return F.scaled_dot_product_attention of this rank's heads: (batch, heads, tokens, features of a head).

    If k and v have fewer heads, each of theirs serves several adjacent heads of q. rate: of dropout.
    """
    options: dict[str, Any] = {"attn_mask": mask, "is_causal": causal, "enable_gqa": q.shape[1] != k.shape[1]}
    if not rate:
        return F.scaled_dot_product_attention(q, k, v, **options)
    with divided(axis, q.device):
        return F.scaled_dot_product_attention(q, k, v, dropout_p=rate, **options)


def mask_of(
    attention: Tensor | None,
    padding: Tensor | None,
    like: Tensor,
    keys: int,
    extra: int,
    axis: ParallelAxis,
    heads: int,
) -> Tensor | None:
    """Return the additive mask of scores: the masks of `nn.MultiheadAttention` as one, for this rank of all `heads`.

    like: q, (batch, this rank's heads, queries, ...). keys: the number of keys in the masks; `extra` keys after them
    are visible.
    """
    batch, _, queries, _ = like.shape
    mask: Tensor | None = None
    shape: tuple[int, ...]
    if attention is not None:
        shape = (queries, keys) if attention.dim() == 2 else (batch * heads, queries, keys)
        mask = _added("attn_mask", attention, shape, like, axis)
        if attention.dim() == 2:
            mask = mask.reshape(1, 1, queries, keys)
        else:
            own = slice(*even(heads, axis.size).slice_of(axis.rank))
            mask = mask.reshape(batch, heads, queries, keys)[:, own]
    if padding is not None:
        shape = (batch, keys)[padding.dim() == 1 :]
        added = _added("key_padding_mask", padding, shape, like, axis).reshape(-1, 1, 1, keys)
        mask = added if mask is None else mask + added
    return F.pad(mask, (0, extra)) if mask is not None and extra else mask


def _added(what: str, mask: Tensor, expected: tuple[int, ...], like: Tensor, axis: ParallelAxis) -> Tensor:
    if mask.shape != expected:
        raise UsageError(f"ColumnAttention: {what} has shape {list(mask.shape)}, expected {list(expected)}")
    if mask.is_floating_point():
        # A trainable mask, for example a position bias, serves the heads of all ranks.
        return (copy(mask, axis) if mask.requires_grad else mask).to(like.dtype)
    if mask.dtype is not torch.bool:
        raise UsageError(f"ColumnAttention: {what} has dtype {mask.dtype}, expected bool or a floating-point dtype")
    return like.new_zeros(mask.shape).masked_fill_(mask, float("-inf"))
