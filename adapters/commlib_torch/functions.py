"""What backward is of every verb by name: an operation by name itself, which can be differentiated in turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from commlib import horovod as core
from commlib.errors import UsageError
from commlib.functional import HOROVOD, find_rule
from commlib_torch._named import (
    ProcessSets,
    Reduction,
    Splits,
    first,
    gradient_name,
    start_allgather,
    start_allreduce,
    start_alltoall,
    start_broadcast,
    start_reducescatter,
)


def allreduce(tensors: Sequence[Tensor], how: Reduction) -> list[Tensor]:
    """Combine tensors element by element. Backward combines gradients in the same way."""
    return list(_AllReduce.apply(how, *tensors))  # type: ignore[no-untyped-call]


def reducescatter(tensors: Sequence[Tensor], how: Reduction) -> list[Tensor]:
    """Combine tensors, and return this rank's part. Backward gathers the parts of the gradients."""
    return list(_ReduceScatter.apply(how, *tensors))  # type: ignore[no-untyped-call]


def allgather(tensors: Sequence[Tensor], name: str | None, process_set: ProcessSets) -> list[Tensor]:
    """Join tensors along dimension 0. Backward takes this rank's part of the mean of the gradients."""
    return list(_AllGather.apply(name, process_set, *tensors))  # type: ignore[no-untyped-call]


def broadcast(tensor: Tensor, root: int, name: str | None, process_set: ProcessSets) -> Tensor:
    """Return the tensor of `root`. Backward gives `root` the mean of the gradients, zeros to the others."""
    result: Tensor = _Broadcast.apply(tensor, root, name, process_set)  # type: ignore[no-untyped-call]
    return result


def alltoall(
    tensor: Tensor, splits: Splits | None, name: str | None, process_set: ProcessSets
) -> tuple[Tensor, Tensor]:
    """Exchange rows. Backward sends the rows of the gradient back to where they came from."""
    result: tuple[Tensor, Tensor] = _AllToAll.apply(tensor, splits, name, process_set)  # type: ignore[no-untyped-call]
    return result


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, how: Reduction, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.how = how
        return tuple(start_allreduce(tensors, how, blocking=True).wait())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        if ctx.how.op not in (core.Average, core.Sum):
            raise UsageError(f"allreduce with op {ctx.how.op.name} has no gradient: only Average and Sum have")
        return (None, *allreduce(gradients, ctx.how.for_gradient()))


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, how: Reduction, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.how = how
        return tuple(start_reducescatter(tensors, how, blocking=True).wait())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        how: Reduction = ctx.how
        gathered = allgather(gradients, gradient_name(how.name), how.process_set)
        size = core.process_set_of(how.process_set).size() or 1
        rule = find_rule("reduce_scatter", how.op.core, HOROVOD)
        factor = how.prescale_factor * how.postscale_factor * rule.factor(size)
        return (None, *(gradient * factor if factor != 1 else gradient for gradient in gathered))


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str | None, process_set: ProcessSets, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.name, ctx.process_set = name, process_set
        results = start_allgather(tensors, name, process_set, blocking=True).wait()
        ctx.rows = [len(tensor) for tensor in tensors]
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        # Where this rank's rows are depends on the lengths that the ranks before it have.
        rows_name = None if ctx.name is None else f"{ctx.name}.rows"
        rows = start_allgather([torch.tensor([ctx.rows])], rows_name, ctx.process_set)
        op = core.resolve_op(find_rule("all_gather_v", rules=HOROVOD).op)
        means = allreduce(gradients, Reduction(op, gradient_name(ctx.name), process_set=ctx.process_set))
        before = first(rows.wait())[: core.process_set_of(ctx.process_set).rank()].sum(0).tolist()
        parts = zip(means, before, ctx.rows, strict=True)
        return (None, None, *(mean.narrow(0, start, length) for mean, start, length in parts))


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, root: int, name: str | None, process_set: ProcessSets) -> Tensor:
        ctx.root, ctx.name, ctx.process_set = root, gradient_name(name), process_set
        return start_broadcast(tensor.detach().clone(), root, name, process_set, blocking=True).wait()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        op = core.resolve_op(find_rule("broadcast", rules=HOROVOD).op)
        mean = first(allreduce(gradients, Reduction(op, ctx.name, process_set=ctx.process_set)))
        return (mean if core.rank() == ctx.root else torch.zeros_like(mean)), None, None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, splits: Splits | None, name: str | None, process_set: ProcessSets
    ) -> tuple[Tensor, Tensor]:
        out, received = start_alltoall(tensor, splits, name, process_set, blocking=True).wait()
        ctx.name, ctx.process_set, ctx.received = gradient_name(name), process_set, received
        ctx.unsent = 0 if splits is None else len(tensor) - int(sum(splits))
        ctx.mark_non_differentiable(received)
        return out, received

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        back, _ = alltoall(gradients[0], ctx.received, ctx.name, ctx.process_set)
        if ctx.unsent:  # splits may leave out rows at the end; those had no part in the result
            back = torch.cat([back, back.new_zeros(ctx.unsent, *back.shape[1:])])
        return back, None, None, None
