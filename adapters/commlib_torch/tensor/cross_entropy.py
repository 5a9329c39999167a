"""Cross-entropy of logits that are divided by words: see `commlib.tensor.vocabulary` for the recipe."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from commlib.data_parallel.parameter_check import check_agreement
from commlib.errors import UsageError
from commlib.functional.agreement import digest_of
from commlib.functional.axis import Axis
from commlib_torch._uncompiled import uncompiled
from commlib_torch.collectives import writing
from commlib_torch.tensor.moves import On, axis_of

_REDUCTIONS = ("mean", "sum", "none")


@uncompiled
def vocabulary_cross_entropy(
    logits: Tensor,
    target: Tensor,
    axis: On,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    vocabulary: int | None = None,
) -> Tensor:
    """Return the cross-entropy of logits whose words are divided among the ranks of an axis.

    As `F.cross_entropy` over the last dimension. logits: (..., this rank's words), of any floating dtype. target:
    integers (...), words of the whole vocabulary, the same on every rank. vocabulary: the number of all words, if it is
    to be checked. Returns a float32, or a float64 for such logits: the mean or sum over the rows that are not ignored
    (nan for none), or with "none" that of each row (...). It has a gradient; a second one is refused.

    Collective: two reductions of a few numbers for each row; none in the backward. Raises UsageError on all ranks.
    """
    shared = axis_of(axis)
    _check(logits, target, label_smoothing, reduction)
    rows, words = logits.reshape(-1, logits.shape[-1]), target.reshape(-1).long()
    is_ignored = words == ignore_index
    said = {
        "dtype": logits.dtype, "ignore_index": ignore_index, "label_smoothing": label_smoothing,
        "reduction": reduction, "vocabulary": vocabulary,
    }  # fmt: skip
    losses: Tensor = _Losses.apply(  # type: ignore[no-untyped-call]
        rows, words, is_ignored, shared, label_smoothing, vocabulary, said
    )
    if reduction == "none":
        return losses.reshape(target.shape)
    return losses.sum() if reduction == "sum" else losses.sum() / (~is_ignored).sum()


class _Losses(Function):
    """The loss of each row, 0 where it is ignored."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, is_ignored: Tensor, axis: Axis, smoothing: float, total: int | None,
        options: dict[str, Any],
    ) -> Tensor:  # fmt: skip
        dtype = torch.promote_types(logits.dtype, torch.float32)
        x = logits.to(dtype, copy=True)
        most, counts = _shared_maximum(x, axis, options)
        _check_words(axis, counts, total, target, is_ignored)
        start, stop = sum(counts[: axis.rank]), sum(counts[: axis.rank + 1])
        is_own = (target >= start) & (target < stop) & ~is_ignored
        own = (target - start).masked_fill(~is_own, 0).unsqueeze(-1)
        x -= most.unsqueeze(-1)
        sums = [x.gather(-1, own).squeeze(-1).masked_fill(~is_own, 0)]
        if smoothing:
            sums.append(x.sum(-1))
        sums.append(x.exp_().sum(-1))
        said = torch.stack(sums)
        _reduce(said, axis, "sum")
        x /= said[-1].unsqueeze(-1)
        losses = said[-1].log() - (1 - smoothing) * said[0]
        if smoothing:
            losses -= smoothing / sum(counts) * said[1]
        ctx.save_for_backward(x, own, is_own, is_ignored)
        ctx.dtype, ctx.smoothing, ctx.total = logits.dtype, smoothing, sum(counts)
        return losses.masked_fill_(is_ignored, 0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # else the gradient of this gradient would silently be zero
            raise UsageError(
                "vocabulary_cross_entropy has no second gradient (create_graph=True): gather the logits, and use "
                "F.cross_entropy"
            )
        softmax, own, is_own, is_ignored = ctx.saved_tensors
        scale = gradient.masked_fill(is_ignored, 0).unsqueeze(-1)
        found = softmax * scale
        found.scatter_add_(-1, own, scale * is_own.unsqueeze(-1) * (ctx.smoothing - 1))
        if ctx.smoothing:
            found -= scale * (ctx.smoothing / ctx.total)
        return found.to(ctx.dtype), None, None, None, None, None, None


def _shared_maximum(x: Tensor, axis: Axis, options: dict[str, Any]) -> tuple[Tensor, list[int]]:
    """Return the largest logit of each row, and how many words each rank has: both in one message.

    With digests of what ranks have asked for. Raises MismatchError on all ranks if these differ.
    """
    lines = [f"{name}: {value}" for name, value in options.items()]
    own = torch.tensor([x.shape[-1], digest_of(lines) % 2**24], dtype=x.dtype)  # exact up to 2^24 words on a rank
    told = x.new_zeros(2, axis.size)
    told[:, axis.rank] = own.to(x.device)
    said = torch.cat((x.amax(-1), told.reshape(-1)))
    _reduce(said, axis, "max")
    counts, digests = said[len(x) :].reshape(2, axis.size).tolist()
    if len(set(digests)) > 1:
        check_agreement(axis.comm, f"vocabulary_cross_entropy on {axis.comm.name}", lines)
    return said[: len(x)], [int(count) for count in counts]


def _reduce(x: Tensor, axis: Axis, op: str) -> None:
    if axis.size > 1:
        writing.all_reduce_(x, op, comm=axis.comm).run()


def _check(logits: Tensor, target: Tensor, smoothing: float, reduction: str) -> None:
    if target.is_floating_point():
        raise UsageError(
            "vocabulary_cross_entropy: the target has probabilities of classes, expected integers: the words"
        )
    if not logits.is_floating_point() or logits.shape[:-1] != target.shape or not logits.dim() or not logits.shape[-1]:
        raise UsageError(
            f"vocabulary_cross_entropy: logits of {logits.dtype}{list(logits.shape)} for a target of shape "
            f"{list(target.shape)}, expected floats of shape {[*target.shape, 'words of this rank']}"
        )
    if not 0 <= smoothing <= 1:
        raise UsageError(f"vocabulary_cross_entropy: label_smoothing is {smoothing}, expected 0 to 1")
    if reduction not in _REDUCTIONS:
        raise UsageError(f"vocabulary_cross_entropy: reduction is {reduction!r}, expected {', '.join(_REDUCTIONS)}")


def _check_words(axis: Axis, counts: list[int], total: int | None, target: Tensor, is_ignored: Tensor) -> None:
    if total is not None and sum(counts) != total:
        raise UsageError(
            f"vocabulary_cross_entropy on {axis.comm.name}: the ranks have logits of {counts} words, together "
            f"{sum(counts)}, expected vocabulary={total}: do not gather them, and give all ranks' layers one axis"
        )
    wrong = target[((target < 0) | (target >= sum(counts))) & ~is_ignored]
    if wrong.numel():
        raise UsageError(
            f"vocabulary_cross_entropy: a target is word {int(wrong[0])}, expected 0 to {sum(counts) - 1}, or "
            "ignore_index"
        )
