"""Products of groups of rows, each with a matrix of its own: what experts compute, in one call for all of a rank."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


def grouped_linear(rows: Tensor, weight: Tensor, bias: Tensor | None, counts: Sequence[int]) -> Tensor:
    """Return `F.linear` of each group of rows with its weight: the first counts[0] rows with weight[0], and so on.

    rows: [sum(counts), inputs]. weight: [groups, outputs, inputs]. bias: [groups, outputs].
    Under autocast: in its dtype.
    """
    device = rows.device.type
    if torch.is_autocast_enabled(device):
        kind = torch.get_autocast_dtype(device)
        rows, weight, bias = rows.to(kind), weight.to(kind), None if bias is None else bias.to(kind)
    with torch.autocast(device, enabled=False):
        found: Tensor = _Grouped.apply(rows, weight, bias, counts)  # type: ignore[no-untyped-call]
    return found


class _Grouped(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, counts: Sequence[int]) -> Tensor:
        ctx.counts, ctx.has_bias = counts, bias is not None
        ctx.save_for_backward(rows, weight)
        out = rows.new_empty(rows.shape[0], weight.shape[1])
        for group, (start, stop) in enumerate(_spans(counts)):
            matrix = weight[group].t()
            if bias is None:
                torch.mm(rows[start:stop], matrix, out=out[start:stop])
            else:
                torch.addmm(bias[group], rows[start:stop], matrix, out=out[start:stop])
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        rows, weight = ctx.saved_tensors
        gradient = gradient.contiguous()
        wants = ctx.needs_input_grad
        of_rows = torch.empty_like(rows) if wants[0] else None
        of_weight = torch.empty_like(weight) if wants[1] else None
        of_bias = weight.new_empty(weight.shape[:2]) if ctx.has_bias and wants[2] else None
        for group, (start, stop) in enumerate(_spans(ctx.counts)):
            part = gradient[start:stop]
            if of_rows is not None:
                torch.mm(part, weight[group], out=of_rows[start:stop])
            if of_weight is not None:
                torch.mm(part.t(), rows[start:stop], out=of_weight[group])
            if of_bias is not None:
                torch.sum(part, 0, out=of_bias[group])
        return of_rows, of_weight, of_bias, None


def _spans(counts: Sequence[int]) -> list[tuple[int, int]]:
    return list(pairwise(accumulate(counts, initial=0)))
