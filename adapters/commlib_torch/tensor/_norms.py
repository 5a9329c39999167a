"""PyTorch's gradient norms for sharded parameters: the norm of full weights.

`torch.nn.utils.clip_grad_norm_` and `get_total_norm` get the gradients of this rank's shards. With the norm of these
alone, each rank would scale replicated weights by another factor. PyTorch's clipping, and libraries built on
it, calls one function for the norm; from the first sharded parameter on, this function sums over ranks. It refuses all
gradients of a pipeline's stage, because a stage without gradients would not call it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from commlib.optim.clipping import check_norm_type, norm_of_powers, power_over_axes
from commlib_torch._graph_breaks import disable_compile
from commlib_torch._shards import sharded_parameters
from commlib_torch._stage_norms import refuse_whole_stages
from commlib_torch.clip import powers_of

_Norm = Callable[..., Tensor]


@functools.cache
def watch_norms() -> None:
    """Make PyTorch's norms of gradients cover full weights from now on."""
    clipping = torch.nn.utils.clip_grad
    norm = _norm_over_axes(clipping._get_total_norm)
    clipping._get_total_norm = norm
    torch.nn.utils.get_total_norm = norm


def _norm_over_axes(plain: _Norm) -> _Norm:
    @functools.wraps(plain)
    @disable_compile
    def total_norm(
        tensors: Tensor | Iterable[Tensor],
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        refuse_whole_stages(given)
        owners = owners_of(given)
        if not any(owner is not None for owner in owners):
            return plain(given, norm_type, error_if_nonfinite, foreach)
        kind = check_norm_type("get_total_norm", norm_type)
        with torch.no_grad():
            power = power_over_axes(powers_of(zip(given, owners, strict=True), kind), kind)
            norm = torch.tensor([norm_of_powers([power], kind)], dtype=given[0].dtype, device=given[0].device)
            return plain([norm], kind, error_if_nonfinite, foreach)  # with its dtype and its error

    return total_norm


def owners_of(gradients: Sequence[Tensor]) -> list[Any]:
    """Return the sharded parameter of each gradient, or None."""
    known = {id(parameter.grad): parameter for parameter in sharded_parameters() if parameter.grad is not None}
    return [known.get(id(gradient)) for gradient in gradients]
