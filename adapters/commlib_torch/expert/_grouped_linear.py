"""Grouped matrix products: one call multiplies each group of rows by the weight of its expert."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable


def grouped_linear(rows: Tensor, weight: Tensor, bias: Tensor | None, counts: list[int]) -> Tensor:
    """Return `F.linear` of each group of rows with its weight: the first counts[0] rows with weight[0], and so on.

    rows: [sum(counts), inputs]. weight: [groups, outputs, inputs]. bias: [groups, outputs]. Autocast's dtype applies.
    """
    device = rows.device.type
    if torch.is_autocast_enabled(device):
        kind = torch.get_autocast_dtype(device)
        rows, weight, bias = rows.to(kind), weight.to(kind), None if bias is None else bias.to(kind)
    with torch.autocast(device, enabled=False):
        output: Tensor = _GroupedLinear.apply(rows, weight, bias, counts)  # type: ignore[no-untyped-call]
    return output


def _products(rows: Tensor, weight: Tensor, bias: Tensor | None, counts: list[int]) -> list[Tensor]:
    """Return each product as a separate tensor."""
    parts, matrices = rows.split(counts), weight.transpose(1, 2).unbind()
    if bias is None:
        return [torch.mm(part, matrix) for part, matrix in zip(parts, matrices, strict=True)]
    each = zip(bias.unbind(), parts, matrices, strict=True)
    return [torch.addmm(own, part, matrix) for own, part, matrix in each]


class _GroupedLinear(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, counts: list[int]) -> Tensor:
        ctx.counts, ctx.has_bias = counts, bias is not None
        ctx.save_for_backward(rows, weight)
        if torch._C._len_torch_dispatch_stack():  # selective checkpoints save whole results, not slices
            return torch.cat(_products(rows, weight, bias, counts))
        out = rows.new_empty(rows.shape[0], weight.shape[1])
        parts, results, matrices = rows.split(counts), out.split(counts), weight.transpose(1, 2).unbind()
        if bias is None:
            for part, matrix, result in zip(parts, matrices, results, strict=True):
                torch.mm(part, matrix, out=result)
        else:
            for part, matrix, result, own in zip(parts, matrices, results, bias.unbind(), strict=True):
                torch.addmm(own, part, matrix, out=result)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        rows, weight = ctx.saved_tensors
        gradient = gradient.contiguous()
        wants = ctx.needs_input_grad
        of_rows = torch.empty_like(rows) if wants[0] else None
        of_weight = torch.empty_like(weight) if wants[1] else None
        of_bias = weight.new_empty(weight.shape[:2]) if ctx.has_bias and wants[2] else None
        parts = gradient.split(ctx.counts)
        if of_rows is not None:
            for part, matrix, result in zip(parts, weight.unbind(), of_rows.split(ctx.counts), strict=True):
                torch.mm(part, matrix, out=result)
        if of_weight is not None:
            for part, own, result in zip(parts, rows.split(ctx.counts), of_weight.unbind(), strict=True):
                torch.mm(part.t(), own, out=result)
        if of_bias is not None:
            for part, result in zip(parts, of_bias.unbind(), strict=True):
                torch.sum(part, 0, out=result)
        return of_rows, of_weight, of_bias, None
