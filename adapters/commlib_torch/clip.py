"""Clip torch's gradients by the norm of all of them together: see `commlib.optim.clipping`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from commlib.communicator import Communicator
from commlib.kernels.host.norm import sum_of_squares
from commlib.optim.clipping import check_limit, clip_factor, norm_of, sum_over_axes
from commlib.sharding.shards import Shard
from commlib_torch._bridge import to_array
from commlib_torch._shards import shard_of
from commlib_torch._stage_norms import by_stages

_SUMMED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@torch.no_grad()
def clip_grad_norm_(parameters: Tensor | Iterable[Tensor], max_norm: float) -> Tensor:
    """Scale gradients, after they were reduced, so that their 2-norm is `max_norm` at most.

    Returns the norm that they had, as a tensor of float64 or, without any gradient of float64, float32. The same
    gradients on the CPU give the same bits on every CPU, so ranks' parameters stay the same even where their CPUs
    differ, which torch.nn.utils.clip_grad_norm_ does not promise; on GPUs they do on those of one kind. Else it does
    what that does: a norm that is infinite or NaN scales by 0 or NaN. A parameter that is divided among ranks counts as
    a whole: then these ranks must all call this, with the same parameters. Parameters of a pipeline, given all that
    this rank has, count with those of all stages: then all ranks of the pipeline must call this. Else no rank waits
    for another one here.

    Raises UsageError for a `max_norm` that is negative or NaN.
    """
    limit = check_limit("clip_grad_norm_", "max_norm", max_norm)
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    values = [values_of(gradient) for gradient in gradients]
    norm = norm_of([_squares_of(comm, own) for comm, own in by_stages(parameters)])
    factor = clip_factor(norm, limit, epsilon=1e-6)  # as torch's own
    if factor != 1:
        for gradient in gradients:
            gradient.mul_(factor)
    double = any(value.dtype == torch.float64 for value in values)
    device = gradients[0].device if gradients else None
    return torch.tensor(norm, dtype=torch.float64 if double else torch.float32, device=device)


def _squares_of(comm: Communicator | None, parameters: Sequence[Tensor]) -> float:
    """Return the sum of squares of gradients, and of those that other ranks of `comm` have."""
    own = sum_over_axes(squares_by_axis(parameters))
    return own if comm is None else float(sum(comm.all_gather_object(own)))


def squares_by_axis(parameters: Iterable[Tensor]) -> Iterator[tuple[Communicator | None, float]]:
    """Yield the sum of squares of each gradient, 0 without one, with the ranks that have its other parts."""
    return powers_by_axis(parameters, 2)


def powers_by_axis(parameters: Iterable[Tensor], norm_type: float) -> Iterator[tuple[Communicator | None, float]]:
    """Yield the sum of powers of each gradient, or its largest element of the norm inf: as `squares_by_axis`."""
    return powers_of(((parameter.grad, parameter) for parameter in parameters), norm_type)


def powers_of(
    given: Iterable[tuple[Tensor | None, Tensor | None]], norm_type: float
) -> Iterator[tuple[Communicator | None, float]]:
    """Yield as `powers_by_axis` does for (gradient, whose it is); that of nobody is whole."""
    pairs = list(given)
    shards = [None if owner is None else shard_of(owner) for _, owner in pairs]
    gradients = [
        gradient if gradient is None or shard is None else _counted(gradient, shard)
        for shard, (gradient, _) in zip(shards, pairs, strict=True)
    ]
    squares: Iterator[float] = iter(())
    if norm_type == 2:
        squares = squares_of([values_of(gradient) for gradient in gradients if gradient is not None])
    for shard, gradient in zip(shards, gradients, strict=True):
        power = 0.0
        if gradient is not None and norm_type == 2:
            power = next(squares)
        elif gradient is not None and gradient.numel():
            norm = float(torch.linalg.vector_norm(_sizes(gradient), norm_type, dtype=torch.float64))
            power = norm if norm_type == math.inf else norm**norm_type
        if shard is None:
            yield None, power
        else:
            yield shard.axis.comm, power


def _counted(gradient: Tensor, shard: Shard) -> Tensor:
    """Return what of a part's gradient counts here: what several ranks have, on one of them."""
    dim, pieces = shard.counted
    if pieces is None:
        return gradient
    return torch.cat([gradient.narrow(dim, first, last - first) for first, last in pieces or ((0, 0),)], dim)


def _sizes(gradient: Tensor) -> Tensor:
    """Return the absolute values of a gradient's elements, which are those of complex numbers as wholes."""
    if gradient.layout != torch.strided:
        gradient = gradient.coalesce().values()
    return gradient.detach().abs().reshape(-1)


def values_of(gradient: Tensor) -> Tensor:
    """Return the elements of a gradient, in one dimension."""
    if gradient.layout != torch.strided:
        gradient = gradient.coalesce().values()  # the other elements are zeros
    if gradient.is_complex():
        gradient = torch.view_as_real(gradient.resolve_conj())
    return gradient.detach().resolve_neg().reshape(-1)


def squares_of(gradients: Sequence[Tensor]) -> Iterator[float]:
    """Yield the sum of squares of each. A GPU is asked for those of all of its own at once: the host waits for it."""
    asked: dict[torch.device, list[Tensor]] = {}
    for values in gradients:
        if not _is_summed_here(values):
            norm = torch.linalg.vector_norm(values, dtype=torch.float64)
            asked.setdefault(values.device, []).append(norm.square())
    told = {device: iter(torch.stack(squares).tolist()) for device, squares in asked.items()}
    for values in gradients:
        yield sum_of_squares(to_array(values)) if _is_summed_here(values) else next(told[values.device])


def _is_summed_here(values: Tensor) -> bool:
    return values.is_cpu and values.dtype in _SUMMED
