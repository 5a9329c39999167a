"""Backward of the named verbs: each is a named operation itself, and differentiable in turn.

`commlib.autodiff` defines the operation on gradients and its factor, for both adapters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from commlib import horovod as core
from commlib.horovod import Reduction
from commlib_torch._bridge import check_dense
from commlib_torch._function_transforms import explain
from commlib_torch.named_verbs._named_operations import (
    ProcessSets,
    Splits,
    first,
    start_allgather,
    start_allreduce,
    start_alltoall,
    start_broadcast,
    start_reducescatter,
)

Backward = Callable[[Sequence[Tensor]], Sequence[Tensor]]
Forward = Callable[[Sequence[Tensor]], tuple[Sequence[Tensor], Backward]]


def allreduce(tensors: Sequence[Tensor], how: Reduction) -> list[Tensor]:
    """Combine tensors element by element. Backward combines gradients in the same way."""

    def forward(tensors: Sequence[Tensor]) -> tuple[Sequence[Tensor], Backward]:
        def backward(gradients: Sequence[Tensor]) -> Sequence[Tensor]:
            how.check_linear(f"allreduce with op {how.op.name}")
            return allreduce(gradients, how.called(gradient_name(how.name)))

        return start_allreduce(tensors, how, blocking=True).wait(), backward

    return _differentiable(forward, tensors)


def reducescatter(tensors: Sequence[Tensor], how: Reduction) -> list[Tensor]:
    """Combine tensors, and return this rank's part. Backward gathers the parts of the gradients."""

    def forward(tensors: Sequence[Tensor]) -> tuple[Sequence[Tensor], Backward]:
        def backward(gradients: Sequence[Tensor]) -> Sequence[Tensor]:
            gathered = allgather(gradients, gradient_name(how.name), how.process_set)
            factor = how.gathered_factor
            return gathered if factor == 1 else [gradient * factor for gradient in gathered]

        return start_reducescatter(tensors, how, blocking=True).wait(), backward

    return _differentiable(forward, tensors)


def allgather(tensors: Sequence[Tensor], name: str | None, process_set: ProcessSets) -> list[Tensor]:
    """Join tensors along dimension 0. Backward takes this rank's part of the mean of the gradients."""

    def forward(tensors: Sequence[Tensor]) -> tuple[Sequence[Tensor], Backward]:
        results = start_allgather(tensors, name, process_set, blocking=True).wait()
        rows = [len(tensor) for tensor in tensors]

        def backward(gradients: Sequence[Tensor]) -> Sequence[Tensor]:
            # The offset of this rank's rows depends on the lengths of earlier ranks.
            lengths = start_allgather([torch.tensor([rows])], None if name is None else f"{name}.rows", process_set)
            means = allreduce(gradients, Reduction.of_gradients("all_gather_v", gradient_name(name), process_set))
            before = first(lengths.wait())[: core.process_set_of(process_set).rank()].sum(0).tolist()
            return [mean.narrow(0, start, length) for mean, start, length in zip(means, before, rows, strict=True)]

        return results, backward

    return _differentiable(forward, tensors)


def broadcast(tensor: Tensor, root: int, name: str | None, process_set: ProcessSets) -> Tensor:
    """Return the tensor of `root`. Backward gives `root` the mean of the gradients, zeros to the others."""
    check_dense(tensor)

    def forward(tensors: Sequence[Tensor]) -> tuple[Sequence[Tensor], Backward]:
        def backward(gradients: Sequence[Tensor]) -> Sequence[Tensor]:
            means = allreduce(gradients, Reduction.of_gradients("broadcast", gradient_name(name), process_set))
            if core.rank() == root:
                return means
            # Connected with the reduction, whose gradient all ranks compute together.
            return [mean.masked_fill(torch.ones((), dtype=torch.bool, device=mean.device), 0) for mean in means]

        copy = first(tensors).detach().clone()
        return [start_broadcast(copy, root, name, process_set, blocking=True).wait()], backward

    return first(_differentiable(forward, [tensor]))


def alltoall(
    tensor: Tensor, splits: Splits | None, name: str | None, process_set: ProcessSets
) -> tuple[Tensor, Tensor]:
    """Exchange rows. Backward sends the rows of the gradient back to where they came from."""

    def forward(tensors: Sequence[Tensor]) -> tuple[Sequence[Tensor], Backward]:
        out, received = start_alltoall(first(tensors), splits, name, process_set, blocking=True).wait()
        unsent = 0 if splits is None else len(first(tensors)) - int(sum(splits))

        def backward(gradients: Sequence[Tensor]) -> Sequence[Tensor]:
            back, _ = alltoall(gradients[0], received, gradient_name(name), process_set)
            if unsent:  # splits may omit rows at the end, which do not contribute to the result
                back = torch.cat([back, back.new_zeros(unsent, *back.shape[1:])])
            return [back]

        return (out, received), backward

    out, received = _differentiable(forward, [tensor])
    return out, received


def gradient_name(name: str | None) -> str | None:
    """Return the name of the backward's operation: derived from the forward's, so that ranks may run in any order."""
    return None if name is None else f"{name}.gradient"


def _differentiable(forward: Forward, tensors: Sequence[Tensor]) -> list[Tensor]:
    try:
        return list(_Operation.apply(forward, *tensors))  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        if (explained := explain(error, "verbs on tensors that require a gradient")) is error:
            raise
        raise explained from error


class _Operation(torch.autograd.Function):
    """Runs `forward` on tensors. It returns results, and a function from their gradients to those of the tensors.

    Integer results, such as row counts, have no gradient: autograd sees that by their dtype.
    """

    @staticmethod
    def forward(ctx: Any, forward: Forward, *tensors: Tensor) -> tuple[Tensor, ...]:
        results, ctx.back = forward(tensors)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return (None, *ctx.back(gradients))
