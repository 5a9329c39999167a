"""Trials: find the dimensions along which an opaque function works on shards, and its gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from commlib.tensor_parallel import equations
from commlib.tensor_parallel.equations import Equation

_MOST_ROUNDINGS = 1000
"""Tolerance: this many rounding errors of the dtype, relative to the largest element."""


def try_function(function: Callable[[Tensor], Tensor], x: Tensor, result: Tensor) -> Equation | None:
    """Return the equation of a function of one tensor with a result of the same shape; None if there is none.

    It is called on halves of each dimension, forward and backward. It needs all of a dimension if its results on halves
    differ from those on all of it, or if it fails.
    """
    if result.shape != x.shape or result.dtype != x.dtype or not x.is_floating_point() or not x.numel():
        return None
    try:
        whole = _run(function, x)
    except Exception:
        return None
    needs = [dim for dim, length in enumerate(x.shape) if length > 1 and not _takes_parts(function, x, whole, dim)]
    return equations.dimwise(tuple(x.shape), needs)


def gradients(function: Callable[..., Any], args: Sequence[Any], of: Sequence[Tensor]) -> list[Tensor]:
    """Return gradients with respect to some arguments of a function, from a result gradient defined by element.

    A function on shards thereby gets the shards of the unsharded function's result gradient. Gradients of functions
    without a derivative are NaN, and gradients of unused arguments are zeros.
    """
    wanted = [one.detach().clone().requires_grad_() for one in of]
    try:
        with torch.enable_grad():
            copies = {id(one): new.clone() for one, new in zip(of, wanted, strict=True)}  # it may write to them
            results = function(*(copies.get(id(one), one) for one in args))
            results = [results] if isinstance(results, Tensor) else list(results)
            results = [one for one in results if isinstance(one, Tensor) and one.requires_grad]
            if not results:
                return [torch.zeros_like(one) for one in of]
            derivatives = torch.autograd.grad(
                results, wanted, [one.detach() + 1 for one in results], allow_unused=True, materialize_grads=True
            )
            return [one.detach() for one in derivatives]
    except Exception:
        return [torch.full_like(one, torch.nan) for one in of]


def _run(function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """Return a function's result, and the gradient of its input for a result gradient that varies by element."""
    with torch.enable_grad():
        given = x.detach().clone().requires_grad_()
        result = function(given)
        (gradient,) = torch.autograd.grad(result, given, x.detach() + 1)
    return result.detach(), gradient


def _takes_parts(function: Callable[[Tensor], Tensor], x: Tensor, whole: tuple[Tensor, Tensor], dim: int) -> bool:
    half = x.shape[dim] // 2
    try:
        parts = [_run(function, part) for part in x.tensor_split((half,), dim)]
        return all(_are_close(torch.cat(own, dim), one) for one, *own in zip(whole, *parts, strict=True))
    except Exception:
        return False


def _are_close(own: Tensor, whole: Tensor) -> bool:
    if own.shape != whole.shape:
        return False
    allowed = _MOST_ROUNDINGS * torch.finfo(whole.dtype).eps * float(whole.abs().max())
    return torch.allclose(own, whole, 0, allowed, equal_nan=True)
