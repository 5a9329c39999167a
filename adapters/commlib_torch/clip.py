"""Clipping by the norm of all gradients together, with the same bits on all ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

import commlib
from commlib.communicator import Communicator
from commlib.data_parallel import clip_factor, global_norm
from commlib.errors import UsageError
from commlib.kernels.norm import sum_of_squares
from commlib_torch._bridge import to_array


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: float, *, comm: Communicator | None = None
) -> Tensor:
    """Scale gradients that all ranks of `comm` have alike, so that their 2-norm is `max_norm` at most. Collective.

    Returns the norm that they had, as a tensor of float64 or, without any gradient of float64, float32. Its bits are
    the same on all ranks, so parameters stay the same even where CPUs differ, and each rank reads 1/P of the elements.
    Otherwise as torch.nn.utils.clip_grad_norm_: a norm that is infinite or NaN scales by 0 or NaN.

    Raises UsageError for a `max_norm` that is negative or NaN, MismatchError on every rank if ranks have gradients of
    different sizes.
    """
    if not max_norm >= 0:
        raise UsageError(f"clip_grad_norm_: max_norm must be a number that is not negative, got {max_norm}")
    parameters = [parameters] if isinstance(parameters, Tensor) else parameters
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    values = [_values(gradient) for gradient in gradients]

    def squares(index: int, start: int, stop: int) -> float:
        return _squares(values[index][start:stop])

    norm = global_norm(comm or commlib.init(), [value.numel() for value in values], squares)
    factor = clip_factor(norm, float(max_norm))
    if factor != 1:  # NaN too
        for gradient in gradients:
            gradient.mul_(factor)
    double = any(value.dtype == torch.float64 for value in values)
    device = gradients[0].device if gradients else None
    return torch.tensor(norm, dtype=torch.float64 if double else torch.float32, device=device)


def _values(gradient: Tensor) -> Tensor:
    """Return the elements of a gradient, in one dimension."""
    if gradient.layout != torch.strided:
        gradient = gradient.coalesce().values()  # the other elements are zeros
    if gradient.is_complex():
        gradient = torch.view_as_real(gradient.resolve_conj())
    return gradient.detach().resolve_neg().reshape(-1)


def _squares(values: Tensor) -> float:
    if values.device.type == "cpu" and values.dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        return sum_of_squares(to_array(values))
    return _squares_by_torch(values)


def _squares_by_torch(values: Any) -> float:
    return float(torch.linalg.vector_norm(values, dtype=torch.float64).square())
