"""Cross entropy of vocabulary-sharded logits: see `commlib.tensor_parallel.vocabulary` for the algorithm."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd import Function

from commlib.comparison.agreement import digest_of, make_or_refuse
from commlib.comparison.parameter_check import check_agreement
from commlib.errors import MismatchError, UsageError
from commlib.literals import Op
from commlib.sharding.axis import AxisRanks, ParallelAxis, axis_of
from commlib.tensor_parallel.run.loss_checks import (
    ROWS,
    WHAT,
    TensorForm,
    check_arguments,
    check_vocabulary,
    different_logits,
    refuse_targets,
    refuse_whole,
    stride,
)
from commlib_torch._bridge import dtype_name, host_array
from commlib_torch._graph_breaks import disable_compile
from commlib_torch._recorded_verbs import writing


@disable_compile
def vocabulary_cross_entropy(
    logits: Tensor,
    target: Tensor,
    ranks: AxisRanks,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Literal["mean", "sum", "none"] = "mean",
    vocabulary: int | None = None,
) -> Tensor:
    """Return the cross entropy of logits whose vocabulary is sharded among the ranks of an axis.

    Like `F.cross_entropy` over the last dimension.

    Collective: two reductions of a few numbers per row, and none in the backward.

    Targets and weights are the same on every rank.

    Returns a float32, or a float64 for such logits: the sum, or the weighted mean, of the rows that are not ignored
    (nan if there are none), or with "none" the loss of each row (...). It has a gradient; a second one is refused.

    Args:
        logits: (..., this rank's tokens), of any floating dtype.
        target: Token ids (...), of the full vocabulary.
        ranks: The ranks of the axis, such as `mesh["tp"]`.
        weight: One number per token of the full vocabulary, without a gradient.
        ignore_index: The target whose rows do not count.
        label_smoothing: The share of the target that is spread over all tokens, 0 to 1.
        reduction: "mean", "sum" or "none".
        vocabulary: The size of the full vocabulary, to be checked.

    Raises:
        UsageError: On all ranks, also for unsharded logits (equal on all ranks, which `vocabulary` rules out).
        MismatchError: If targets, weights or options differ among ranks.
    """
    shared = axis_of(ranks, "vocabulary_cross_entropy")
    given, of_weight = (_form_of(logits), _form_of(target)), None if weight is None else _form_of(weight)
    make_or_refuse(
        shared.comm,
        WHAT,
        lambda: check_arguments(*given, of_weight, label_smoothing, reduction, plain_loss="F.cross_entropy"),
    )
    rows, words = logits.reshape(-1, logits.shape[-1]), target.reshape(-1).long()
    is_ignored = words == ignore_index
    options = {
        "dtype": logits.dtype, "ignore_index": ignore_index, "label_smoothing": label_smoothing,
        "reduction": reduction, "vocabulary": vocabulary,
    }  # fmt: skip
    if weight is not None:
        weight = weight.detach().to(logits.device, torch.promote_types(logits.dtype, torch.float32))
    losses: Tensor = _Losses.apply(  # type: ignore[no-untyped-call]
        rows, words, is_ignored, weight, shared, label_smoothing, vocabulary, options
    )
    if reduction == "none":
        return losses.reshape(target.shape)
    if reduction == "sum":
        return losses.sum()
    counted: Tensor = ~is_ignored if weight is None else _target_weights(weight, words, is_ignored)
    return losses.sum() / counted.sum()


class _Losses(Function):
    """The loss of each row, 0 if it is ignored."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, is_ignored: Tensor, weight: Tensor | None, axis: ParallelAxis,
        smoothing: float, total: int | None, options: dict[str, Any],
    ) -> Tensor:  # fmt: skip
        dtype = torch.promote_types(logits.dtype, torch.float32)
        x = logits.to(dtype, copy=True)
        most, counts = _shared_maximum(x, target, weight, axis, options)
        check_vocabulary(axis, counts, total, None if weight is None else len(weight))
        refuse_targets(target[((target < 0) | (target >= sum(counts))) & ~is_ignored], sum(counts))
        start, stop = sum(counts[: axis.rank]), sum(counts[: axis.rank + 1])
        is_own = (target >= start) & (target < stop) & ~is_ignored
        own = (target - start).masked_fill(~is_own, 0).unsqueeze(-1)
        x -= most.unsqueeze(-1)
        sums = [x.gather(-1, own).squeeze(-1).masked_fill(~is_own, 0)]
        own_weight = None if weight is None else weight[start:stop]
        if smoothing:
            sums.append(x.sum(-1) if own_weight is None else x @ own_weight)
        sums.append(x.exp_().sum(-1))
        message = torch.stack(sums)
        _reduce(message, axis, "sum")
        x /= message[-1].unsqueeze(-1)
        # Factors of the target's term, and of the logarithm of the sum.
        ctx.each = smoothing / sum(counts)
        of_target: Any = 1 - smoothing
        of_all: Any = 1.0
        if weight is not None:
            of_target = of_target * _target_weights(weight, target, is_ignored)
            of_all = of_target + ctx.each * weight.sum() if smoothing else of_target
        losses = message[-1].log() * of_all - of_target * message[0]
        if smoothing:
            losses -= ctx.each * message[1]
        ctx.save_for_backward(x, own, is_own, is_ignored, own_weight)
        ctx.dtype, ctx.of_target, ctx.of_all = logits.dtype, of_target, of_all
        masked: Tensor = losses.masked_fill_(is_ignored, 0)
        return masked

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # otherwise the gradient of this gradient would silently be zero
            raise UsageError(
                f"{WHAT} has no second gradient (create_graph=True): gather the logits, and use F.cross_entropy"
            )
        softmax, own, is_own, is_ignored, weight = ctx.saved_tensors
        scale = gradient.masked_fill(is_ignored, 0)
        gradient_of_x = softmax * (scale * ctx.of_all).unsqueeze(-1)
        gradient_of_x.scatter_add_(-1, own, (scale * is_own * -ctx.of_target).unsqueeze(-1))
        if ctx.each:
            gradient_of_x -= (scale * ctx.each).unsqueeze(-1) * (1 if weight is None else weight)
        return gradient_of_x.to(ctx.dtype), None, None, None, None, None, None, None


def _target_weights(weight: Tensor, target: Tensor, is_ignored: Tensor) -> Tensor:
    """Return the weight of each row's target, 0 if it is ignored."""
    return weight[target.masked_fill(is_ignored, 0)].masked_fill(is_ignored, 0)


def _shared_maximum(
    x: Tensor, target: Tensor, weight: Tensor | None, axis: ParallelAxis, options: dict[str, Any]
) -> tuple[Tensor, list[int]]:
    """Return the largest logit of each row, and the number of tokens of each rank, from one message.

    The message also has digests of the options and targets. Raises MismatchError on all ranks if these differ,
    UsageError if their logits do not.
    """
    rows, most = min(ROWS, len(x)), x.amax(-1)
    lines = [f"{name}: {value}" for name, value in options.items()]
    own = torch.tensor([x.shape[-1], digest_of(lines) % 2**24], dtype=x.dtype)  # exact up to 2^24 tokens on a rank
    by_rank = x.new_zeros(3, axis.size)
    by_rank[:2, axis.rank], by_rank[2, axis.rank] = own.to(x.device), _digest(target, weight)
    message = torch.cat((most, by_rank.reshape(-1), -most[:rows]))
    try:
        _reduce(message, axis, "max")
    except MismatchError as error:
        raise different_logits(axis, options["dtype"], len(x), error) from error
    least = message[len(message) - rows :]
    numbers = torch.cat((message[len(x) : len(message) - rows], message[:rows], least)).tolist()
    counts, *digests = (numbers[at * axis.size : (at + 1) * axis.size] for at in range(3))
    if any(len(set(theirs)) > 1 for theirs in digests):
        lines += [f"weight: {'none' if weight is None else int(_digest(weight, None))}"]
        lines += [f"target, {len(target)} rows: {int(_digest(target, None))}"]
        check_agreement(axis.comm, f"{WHAT} on {axis.comm.name}", lines)
    highest, lowest = numbers[3 * axis.size : 3 * axis.size + rows], numbers[3 * axis.size + rows :]
    if options["vocabulary"] is None and axis.size > 1 and rows and highest == [-low for low in lowest]:
        refuse_whole(axis, host_array(x[:rows, :: stride(x.shape[-1])]), x.shape[-1])
    return message[: len(x)], [int(count) for count in counts]


def _digest(x: Tensor, other: Tensor | None) -> Tensor:
    """Return a 24-bit digest of a tensor on its device, without waiting for a GPU."""
    bits = x.double().view(torch.int64) if x.is_floating_point() else x
    # Each position has an odd factor, so that a swap of two elements changes the sum.
    total = ((bits + 1) * (torch.arange(len(bits), device=x.device) * _FACTOR | 1)).sum()
    if other is not None:
        total = total + _digest(other, None) * _FACTOR
    return (total ^ (total >> 24) ^ (total >> 48)) & 0xFFFFFF


_FACTOR = 0x9E3779B97F4A7C1


def _reduce(x: Tensor, axis: ParallelAxis, op: Op) -> None:
    if axis.size > 1:
        writing.all_reduce_(x, op, ranks=axis.comm).run()


def _form_of(x: Tensor) -> TensorForm:
    return TensorForm(dtype_name(x.dtype), x.shape)
