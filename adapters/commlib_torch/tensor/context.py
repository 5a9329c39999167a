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

from commlib.comparison.agreement import or_refused
from commlib.context_parallel.attention import WHAT, Attention, Given, Options
from commlib.sharding.axis import Axis
from commlib_torch._bridge import check, device_kind, dtype_name
from commlib_torch._uncompiled import uncompiled
from commlib_torch.tensor._by_heads import attention_by_heads
from commlib_torch.tensor._keys import whole_mask
from commlib_torch.tensor._ring import Way, ring_attention
from commlib_torch.tensor.moves import On, axis_of
from commlib_torch.tensor.sequences import SequenceLoader, loss_mean, position_ids, shard_sequence, unshard_sequence

_SEEDS = 1 << 62

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
    window: tuple[int, int] | None = None,
    mask: Tensor | None = None,
    key_mask: Tensor | None = None,
    method: str = "ring",
    dropout_p: float = 0.0,
    seed: int | None = None,
) -> Tensor:
    """Return `torch.nn.functional.scaled_dot_product_attention` over sequences that are divided among ranks.

    q: (batch, heads, this rank's tokens, head_dim); k and v alike, or with fewer heads, each of which serves as many of
    q's. Returns (batch, heads, this rank's tokens, head_dim of v). causal: a token sees itself and those before it in
    the whole sequence. scale: by default 1 / sqrt(head_dim); a negative one, too. layout: "balanced" or "contiguous",
    as `shard_sequence` has divided it. length: of the whole sequence, by default what the ranks' tokens add up to.
    documents: where packed documents begin and the last one ends, (0, 5, 11), the same for the whole batch; tokens see
    their document alone.

    window: (left, right), how many positions before and after its own a token sees, -1 for all; with `causal` none
    after. A sliding window of n tokens, as Mistral's, is (n - 1, 0). key_mask: bool (batch, this rank's tokens), False
    for keys that none sees, such as padding. mask: of this rank's queries over all keys in the sequence's order,
    (batch or 1, heads or 1, this rank's tokens or 1, tokens of the whole sequence), or without the first one or two:
    bool, True for what is seen, or floats that are added to scores, and have a gradient, that of this rank's queries.
    Where several are given, a token sees what all let it see; one that sees nothing gets zeros, and gives no gradient.

    dropout_p: the share of weights that is dropped, 0 in evaluation. seed: of what is dropped, by default a number of
    PyTorch's generator, which each rank draws; that of the axis' first rank counts. The same weights are dropped on any
    number of ranks, by either method, and where a checkpoint recomputes. Heads that are divided among other ranks
    with the same stream, as those along "tp", drop alike: call it within `streams.divided(mesh["tp"])`.

    method: "ring", keys and values travel round the ranks while blocks are computed; a rank never has the whole
    sequence. "all_to_all" (Ulysses): a rank gets the whole sequence of some heads, in two exchanges; if there are
    fewer heads of q than ranks, some ranks idle. An axis' codec is used by "all_to_all" alone.

    Collective over the axis, and so is its backward, which each rank must run, one without tokens too. Raises
    UsageError for arguments that do not fit, MismatchError on all ranks where these differ among ranks.
    """
    axis = _axis_of(axis)
    q, k, v = (_cast(x) for x in (q, k, v))
    options = Options(causal, scale, layout, length, documents, window, method, dropout_p)

    def made() -> Attention:
        masks = [x for x in (mask, key_mask) if x is not None]
        tensors = _given(q), _given(k), _given(v), _given(mask), _given(key_mask)
        return Attention.of(axis, tensors, options, device_kind((q, k, v, *masks)))

    call = or_refused(axis.comm, WHAT, made, 2)
    if seed is None:
        seed = int(torch.randint(_SEEDS, (), device="cpu")) if dropout_p else 0
    divided, seed = call.agree(q.shape[2], int(seed) % _SEEDS)
    if call.sign < 1:
        q = q * call.sign
    seen = whole_mask(mask, key_mask, axis, divided)
    if method == "all_to_all":
        return attention_by_heads(q, k, v, seen, call, divided, seed)
    return ring_attention(q, k, v, seen, call, Way(divided, axis.rank, seed))


def _given(x: Tensor | None) -> Given:
    if x is None:
        return Given()
    return Given(dtype_name(x.dtype), x.shape, torch.is_grad_enabled() and x.requires_grad)


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
