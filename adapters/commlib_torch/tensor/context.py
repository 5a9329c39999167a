"""Context parallelism: attention over sequences that are divided among the ranks of an axis.

from commlib_torch.tensor import context as cp

for batch in cp.SequenceLoader(batches, mesh["cp"]):            # this rank's tokens, positions and next tokens
    logits = model(batch["input_ids"], batch["position_ids"])   # with cp.attention(q, k, v, mesh["cp"], causal=True)
    labels = batch["labels"]
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    cp.loss_mean(loss, (labels != -100).sum(), mesh["cp"]).backward()   # gradients: to be averaged over the axis
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from commlib.functional.attention import Attention
from commlib.functional.axis import Axis
from commlib_torch._bridge import check, device_kind, dtype_name
from commlib_torch._uncompiled import uncompiled
from commlib_torch.tensor._by_heads import attention_by_heads
from commlib_torch.tensor._ring import ring_attention
from commlib_torch.tensor.moves import On, axis_of
from commlib_torch.tensor.sequences import SequenceLoader, loss_mean, position_ids, shard_sequence, unshard_sequence

__all__ = ["SequenceLoader", "attention", "loss_mean", "position_ids", "shard_sequence", "unshard_sequence"]


@uncompiled
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    axis: On,
    *,
    causal: bool = False,
    scale: float | None = None,
    layout: str = "balanced",
    length: int | None = None,
    documents: Iterable[int] | None = None,
    method: str = "ring",
    dropout_p: float = 0.0,
) -> Tensor:
    """Return `torch.nn.functional.scaled_dot_product_attention` over sequences that are divided among ranks.

    q: (batch, heads, this rank's tokens, head_dim); k and v alike, or with fewer heads, each of which serves as many of
    q's. Returns (batch, heads, this rank's tokens, head_dim of v). causal: a token sees itself and those before it in
    the whole sequence. scale: by default 1 / sqrt(head_dim). layout: "balanced" or "contiguous", as `shard_sequence`
    has divided it. length: of the whole sequence, by default what the ranks' tokens add up to. documents: where packed
    documents begin and the last one ends, (0, 5, 11), the same for the whole batch; tokens see their document alone.

    method: "ring", keys and values travel round the ranks while blocks are computed; a rank never has the whole
    sequence. "all_to_all" (Ulysses): a rank gets the whole sequence of some heads, in two exchanges; if there are
    fewer heads of q than ranks, some ranks idle. An axis' codec is used by "all_to_all" alone.

    Collective over the axis, and so is its backward, which each rank must run, one without tokens too. Raises
    UsageError for arguments that do not fit, MismatchError on all ranks where these differ among ranks.
    """
    axis = _axis_of(axis)
    q, k, v = (_cast(x) for x in (q, k, v))
    call = Attention.of(
        axis,
        q.shape,
        k.shape,
        v.shape,
        [dtype_name(x.dtype) for x in (q, k, v)],
        causal=causal,
        scale=scale,
        layout=layout,
        length=length,
        documents=documents,
        method=method,
        dropout_p=dropout_p,
        device=device_kind((q, k, v)),
    )
    divided = call.agree(q.shape[2])
    if method == "all_to_all":
        return attention_by_heads(q, k, v, call, divided)
    return ring_attention(q, k, v, call, call.ring(divided))


def _axis_of(axis: On) -> Axis:
    if isinstance(axis, Axis):
        return axis
    found = axis_of(axis)
    found.threads = torch.get_num_threads()
    return found


def _cast(x: Tensor) -> Tensor:
    """Return a tensor in the dtype in which scaled_dot_product_attention would take it."""
    check(x)
    kind = x.device.type
    lower = torch.is_autocast_enabled(kind) and x.dtype is torch.float32
    return x.to(torch.get_autocast_dtype(kind)) if lower else x
