"""Trial: find out along which dimensions a function that nobody can look into works on parts, and its gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from commlib.tensor_parallel import equations
from commlib.tensor_parallel.equations import Equation

_MOST_ROUNDINGS = 1000
"""By how many of its dtype's roundings, of the largest element, a number may differ."""


def tried(function: Callable[[Tensor], Tensor], x: Tensor, result: Tensor) -> Equation | None:
    """Return the equation of a function of one tensor, which gives one of the same shape; None if it is another one.

    It is called with halves of each dimension, forward and backward. Dimensions of which it does not treat halves as it
    does all, or fails with, are those that it needs.
    """
    if result.shape != x.shape or result.dtype != x.dtype or not x.is_floating_point() or not x.numel():
        return None
    try:
        whole = _ran(function, x)
    except Exception:
        return None
    needs = [dim for dim, length in enumerate(x.shape) if length > 1 and not _takes_parts(function, x, whole, dim)]
    return equations.along(tuple(x.shape), needs)


def gradients(function: Callable[..., Any], args: Sequence[Any], of: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients of some of a function's arguments, from one that its results say, element by element.

    So a function of parts is asked with the parts of what a function of the whole is. What it cannot differentiate has
    gradients that are no numbers, and what it does not depend on zeros.
    """
    wanted = [one.detach().clone().requires_grad_() for one in of]
    try:
        with torch.enable_grad():
            copies = {id(one): new.clone() for one, new in zip(of, wanted, strict=True)}  # which it may write
            results = function(*(copies.get(id(one), one) for one in args))
            results = [results] if isinstance(results, Tensor) else list(results)
            results = [one for one in results if isinstance(one, Tensor) and one.requires_grad]
            if not results:
                return [torch.zeros_like(one) for one in of]
            found = torch.autograd.grad(
                results, wanted, [one.detach() + 1 for one in results], allow_unused=True, materialize_grads=True
            )
            return [one.detach() for one in found]
    except Exception:
        return [torch.full_like(one, torch.nan) for one in of]


def _ran(function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """Return a function's result, and the gradient of what it was given from one that differs by elements."""
    with torch.enable_grad():
        given = x.detach().clone().requires_grad_()
        result = function(given)
        (gradient,) = torch.autograd.grad(result, given, x.detach() + 1)
    return result.detach(), gradient


def _takes_parts(function: Callable[[Tensor], Tensor], x: Tensor, whole: tuple[Tensor, Tensor], dim: int) -> bool:
    half = x.shape[dim] // 2
    try:
        parts = [_ran(function, part) for part in x.tensor_split((half,), dim)]
        return all(_are_close(torch.cat(own, dim), one) for one, *own in zip(whole, *parts, strict=True))
    except Exception:
        return False


def _are_close(own: Tensor, whole: Tensor) -> bool:
    if own.shape != whole.shape:
        return False
    allowed = _MOST_ROUNDINGS * torch.finfo(whole.dtype).eps * float(whole.abs().max())
    return torch.allclose(own, whole, 0, allowed, equal_nan=True)
