"""Context parallelism: attention over sequences sharded among the ranks of an axis.

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

from commlib.comparison.agreement import make_or_refuse
from commlib.context_parallel import SequenceLayout
from commlib.context_parallel.attention import WHAT, AttentionCall, AttentionOptions, TensorInfo
from commlib.literals import AttentionMethod, SequenceOrder
from commlib.sharding.axis import AxisRanks, ParallelAxis, axis_of
from commlib.tensor_parallel.moves import gather
from commlib_torch._bridge import check, device_kind, dtype_name
from commlib_torch._graph_breaks import disable_compile
from commlib_torch.tensor._head_exchange import attention_by_heads
from commlib_torch.tensor._ring import RingCall, ring_attention
from commlib_torch.tensor.moves import redistribute
from commlib_torch.tensor.sequences import (
    SequenceLoader,
    loss_mean,
    position_ids,
    shard_sequence,
    take_ranges,
    unshard_sequence,
)

_SEEDS = 1 << 62

__all__ = ["SequenceLoader", "attention", "loss_mean", "position_ids", "shard_sequence", "unshard_sequence"]


@disable_compile
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ranks: AxisRanks,
    *,
    causal: bool = False,
    scale: float | None = None,
    layout: SequenceOrder = "balanced",
    length: int | None = None,
    documents: Iterable[int] | None = None,
    window: tuple[int, int] | None = None,
    mask: Tensor | None = None,
    key_mask: Tensor | None = None,
    method: AttentionMethod = "ring",
    dropout_p: float = 0.0,
    seed: int | None = None,
) -> Tensor:
    """Return `torch.nn.functional.scaled_dot_product_attention` over sequences sharded among ranks.

    Collective over the axis, and so is its backward, which each rank must run, including ranks without tokens.

    Returns (batch, heads, this rank's tokens, head_dim of v).

    Args:
        q: (batch, heads, this rank's tokens, head_dim); k and v alike, or with fewer heads, each of which serves
            several heads of q.
        k: Keys, like `q`, or with fewer heads; each serves several heads of `q`.
        v: Values, like `k`; head_dim may be another.
        ranks: The ranks of the axis, such as `mesh["cp"]`.
        causal: A token sees itself and earlier tokens of the full sequence.
        scale: By default 1 / sqrt(head_dim); may be negative.
        layout: "balanced" or "contiguous", as in `shard_sequence`.
        length: The length of the full sequence; by default the sum of the ranks' tokens.
        documents: The boundaries of packed documents, such as (0, 5, 11), the same for the whole batch; tokens see only
            their document.
        window: (left, right), the number of visible positions before and after a token, -1 for all; with `causal` none
            after. A sliding window of n tokens, as in Mistral, is (n - 1, 0).
        mask: A mask of this rank's queries over all keys in the sequence's order, (batch or 1, heads or 1, this rank's
            tokens or 1, tokens of the full sequence), or without the first one or two: bool, True for visible keys, or
            floats that are added to scores and have a gradient, for this rank's queries. A token sees a key only if all
            given masks allow it; a token that sees none gets zeros, and contributes no gradient.
        key_mask: Bool (batch, this rank's tokens), False for keys that no token sees, such as padding.
        method: "ring": keys and values circulate among the ranks while blocks are computed; no rank has the full
            sequence. "all_to_all" (Ulysses): a rank gets the full sequence of some heads, by two all-to-alls; with
            fewer heads of q than ranks, some ranks idle. Only "all_to_all" uses an axis' codec.
        dropout_p: The share of dropped weights, 0 in evaluation.
        seed: The seed of dropout; by default a number from PyTorch's generator, which each rank draws; the one of the
            axis' first rank counts. The same weights are dropped on any number of ranks, by both methods, and in
            recomputation. Heads sharded among other ranks with the same stream, such as those along "tp", have equal
            dropout: call it within `streams.divided(mesh["tp"])`.

    Raises:
        UsageError: For inconsistent arguments.
        MismatchError: On all ranks if arguments differ among ranks.

    Examples:
        >>> q = torch.randn(1, 2, 4, 8)  # 4 of 8 tokens on each of 2 ranks
        >>> ct.context.attention(q, q, q, comm, causal=True).shape
        torch.Size([1, 2, 4, 8])
    """
    axis = _axis_of(ranks)
    q, k, v = (_cast(x) for x in (q, k, v))
    options = AttentionOptions(causal, scale, layout, length, documents, window, method, dropout_p)

    def build() -> AttentionCall:
        masks = [x for x in (mask, key_mask) if x is not None]
        tensors = (
            _describe_arguments(q),
            _describe_arguments(k),
            _describe_arguments(v),
            _describe_arguments(mask),
            _describe_arguments(key_mask),
        )
        return AttentionCall.of(axis, tensors, options, device_kind((q, k, v, *masks)))

    call = make_or_refuse(axis.comm, WHAT, build, 2)
    if seed is None:
        seed = int(torch.randint(_SEEDS, (), device="cpu")) if dropout_p else 0
    divided, seed = call.agree(q.shape[2], int(seed) % _SEEDS)
    if call.sign < 1:
        q = q * call.sign
    seen = whole_mask(mask, key_mask, axis, divided)
    if method == "all_to_all":
        return attention_by_heads(q, k, v, seen, call, divided, seed)
    return ring_attention(q, k, v, seen, call, RingCall(divided, axis.rank, seed))


def _describe_arguments(x: Tensor | None) -> TensorInfo:
    if x is None:
        return TensorInfo()
    return TensorInfo(dtype_name(x.dtype), x.shape, torch.is_grad_enabled() and x.requires_grad)


def _axis_of(ranks: AxisRanks) -> ParallelAxis:
    if isinstance(ranks, ParallelAxis):
        return ranks
    axis = axis_of(ranks, WHAT)
    axis.threads = torch.get_num_threads()
    return axis


def _cast(x: Tensor) -> Tensor:
    """Return a tensor in the dtype that scaled_dot_product_attention would use."""
    check(x)
    kind = x.device.type
    lower = torch.is_autocast_enabled(kind) and x.dtype is torch.float32
    return x.to(torch.get_autocast_dtype(kind)) if lower else x


def whole_mask(
    mask: Tensor | None, key_mask: Tensor | None, axis: ParallelAxis, layout: SequenceLayout
) -> Tensor | None:
    """Return the mask of this rank's queries, with four dimensions, or None. Collective if there is a key mask."""
    whole = None
    if mask is not None:
        whole = take_ranges(mask[(None,) * (4 - mask.dim())], layout.by_rank, 3)
    if key_mask is None:
        return whole
    keys = redistribute(key_mask.byte(), ParallelAxis(axis.comm), gather(1, lengths=layout.counts)).bool()[
        :, None, None
    ]
    if whole is None:
        return keys
    return whole & keys if whole.dtype is torch.bool else whole.masked_fill(~keys, -torch.inf)
