"""Clip torch's gradients by their total norm: see `commlib.optim.clipping`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from commlib.arguments import describe_type, list_of
from commlib.communicator import Communicator
from commlib.errors import UsageError
from commlib.kernels.norm import sum_of_squares
from commlib.optim.clipping import check_limit, clip_factor, norm_of, sum_over_axes
from commlib.sharding.shards import Shard
from commlib_torch._bridge import to_array
from commlib_torch._shards import shard_of
from commlib_torch._stage_norms import group_by_stages

_SUMMED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@torch.no_grad()
def clip_grad_norm_(parameters: Tensor | Iterable[Tensor], max_norm: float) -> Tensor:
    """Scale gradients to a total 2-norm of at most `max_norm`. Call it after their reduction.

    Returns the norm before scaling, as a float64 tensor if any gradient is float64, otherwise float32. Equal gradients
    give equal bits on every CPU, so parameters stay equal on ranks with different CPUs, which
    torch.nn.utils.clip_grad_norm_ does not promise; on GPUs this holds for GPUs of one model. Otherwise it works like
    torch's: an infinite or NaN norm scales by 0 or NaN. A sharded parameter counts as the full one: the ranks that
    share it must all call this, with the same parameters. Parameters of a pipeline (pass all of this rank's) count with
    those of all stages: all ranks of the pipeline must call this. In all other cases no rank waits for another.

    Args:
        parameters: A parameter, or parameters, with reduced gradients; those without a gradient count 0.
        max_norm: The norm to scale down to, 0 or more.

    Raises:
        UsageError: For a `max_norm` that is negative or NaN.
    """
    limit = check_limit("clip_grad_norm_", "max_norm", max_norm)
    parameters = _read_parameters(parameters)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    values = [values_of(gradient) for gradient in gradients]
    norm = norm_of([_squares_of(comm, own) for comm, own in group_by_stages(parameters)])
    factor = clip_factor(norm, limit, epsilon=1e-6)  # as in torch
    if factor != 1:
        for gradient in gradients:
            gradient.mul_(factor)
    double = any(value.dtype == torch.float64 for value in values)
    device = gradients[0].device if gradients else None
    return torch.tensor(norm, dtype=torch.float64 if double else torch.float32, device=device)


def _read_parameters(given: Any) -> list[Tensor]:
    """Return parameters as a list. Raises UsageError for anything else."""
    if isinstance(given, Tensor):
        return [given]
    expected = "parameters, such as model.parameters()"
    parameters = list_of("clip_grad_norm_", expected, given)
    for each in parameters:
        if not isinstance(each, Tensor):
            raise UsageError(f"clip_grad_norm_: expected {expected}, got {describe_type(each)} among them")
    return parameters


def _squares_of(comm: Communicator | None, parameters: Sequence[Tensor]) -> float:
    """Return the sum of squares of the gradients, including those of the other ranks of `comm`."""
    own = sum_over_axes(squares_by_axis(parameters))
    return own if comm is None else float(sum(comm.all_gather_object(own)))


def squares_by_axis(parameters: Iterable[Tensor]) -> Iterator[tuple[Communicator | None, float]]:
    """Yield the sum of squares of each gradient, 0 if it is missing, with the ranks that have its other shards."""
    return powers_by_axis(parameters, 2)


def powers_by_axis(parameters: Iterable[Tensor], norm_type: float) -> Iterator[tuple[Communicator | None, float]]:
    """Yield the sum of powers of each gradient (the maximum for the inf norm), in the form of `squares_by_axis`."""
    return powers_of(((parameter.grad, parameter) for parameter in parameters), norm_type)


def powers_of(
    given: Iterable[tuple[Tensor | None, Tensor | None]], norm_type: float
) -> Iterator[tuple[Communicator | None, float]]:
    """Yield as `powers_by_axis` does for pairs (gradient, parameter); without a parameter the gradient is unsharded."""
    pairs = list(given)
    shards = [None if owner is None else shard_of(owner) for _, owner in pairs]
    gradients = [
        gradient if gradient is None or shard is None else _counted_elements(gradient, shard)
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


def _counted_elements(gradient: Tensor, shard: Shard) -> Tensor:
    """Return the elements of a shard's gradient that this rank counts: an element on several ranks counts once."""
    dim, pieces = shard.counted
    if pieces is None:
        return gradient
    return torch.cat([gradient.narrow(dim, first, last - first) for first, last in pieces or ((0, 0),)], dim)


def _sizes(gradient: Tensor) -> Tensor:
    """Return the absolute values of a gradient's elements (the modulus of complex numbers)."""
    if gradient.layout != torch.strided:
        gradient = gradient.coalesce().values()
    return gradient.detach().abs().reshape(-1)


def values_of(gradient: Tensor) -> Tensor:
    """Return the elements of a gradient in one dimension."""
    if gradient.layout != torch.strided:
        gradient = gradient.coalesce().values()  # all other elements are zeros
    if gradient.is_complex():
        gradient = torch.view_as_real(gradient.resolve_conj())
    return gradient.detach().resolve_neg().reshape(-1)


def squares_of(gradients: Sequence[Tensor]) -> Iterator[float]:
    """Yield the sum of squares of each tensor. The host waits once per GPU, for the sums of all its tensors."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for values in gradients:
        if not _is_summed_here(values):
            norm = torch.linalg.vector_norm(values, dtype=torch.float64)
            by_device.setdefault(values.device, []).append(norm.square())
    numbers = {device: iter(torch.stack(squares).tolist()) for device, squares in by_device.items()}
    for values in gradients:
        yield sum_of_squares(to_array(values)) if _is_summed_here(values) else next(numbers[values.device])


def _is_summed_here(values: Tensor) -> bool:
    return values.is_cpu and values.dtype in _SUMMED
