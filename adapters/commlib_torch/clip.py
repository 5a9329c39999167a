"""Clip torch's gradients by the norm of all of them together: see `commlib.optim.clipping`."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from commlib.kernels.host.norm import sum_of_squares
from commlib.optim.clipping import check_limit, clip_factor, norm_of
from commlib_torch._bridge import to_array

_SUMMED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@torch.no_grad()
def clip_grad_norm_(parameters: Tensor | Iterable[Tensor], max_norm: float) -> Tensor:
    """Scale gradients, after they were reduced, so that their 2-norm is `max_norm` at most.

    Returns the norm that they had, as a tensor of float64 or, without any gradient of float64, float32. The same
    gradients on the CPU give the same bits on every CPU, so ranks' parameters stay the same even where their CPUs
    differ, which torch.nn.utils.clip_grad_norm_ does not promise; else it does what that does: a norm that is infinite
    or NaN scales by 0 or NaN. No rank waits for another one here.

    Raises UsageError for a `max_norm` that is negative or NaN.
    """
    limit = check_limit("clip_grad_norm_", "max_norm", max_norm)
    parameters = [parameters] if isinstance(parameters, Tensor) else parameters
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    values = [values_of(gradient) for gradient in gradients]
    norm = norm_of(map(squares_of, values))
    factor = clip_factor(norm, limit, epsilon=1e-6)  # as torch's own
    if factor != 1:
        for gradient in gradients:
            gradient.mul_(factor)
    double = any(value.dtype == torch.float64 for value in values)
    device = gradients[0].device if gradients else None
    return torch.tensor(norm, dtype=torch.float64 if double else torch.float32, device=device)


def values_of(gradient: Tensor) -> Tensor:
    """Return the elements of a gradient, in one dimension."""
    if gradient.layout != torch.strided:
        gradient = gradient.coalesce().values()  # the other elements are zeros
    if gradient.is_complex():
        gradient = torch.view_as_real(gradient.resolve_conj())
    return gradient.detach().resolve_neg().reshape(-1)


def squares_of(values: Tensor) -> float:
    if values.device.type == "cpu" and values.dtype in _SUMMED:
        return sum_of_squares(to_array(values))
    return float(torch.linalg.vector_norm(values, dtype=torch.float64).square())
