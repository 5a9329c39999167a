"""Redistribution of tensors over an axis, with gradients: see `commlib.tensor_parallel.moves` for each function."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from commlib.errors import UsageError
from commlib.sharding.axis import AxisRanks, ParallelAxis, axis_of
from commlib.tensor_parallel import moves
from commlib.tensor_parallel.moves import COPY, REDUCE, Redistribute
from commlib.tensor_parallel.run.moves import run
from commlib_torch._bridge import array_of, core_array, pack, to_tensor
from commlib_torch._function_transforms import explain
from commlib_torch._graph_breaks import disable_compile
from commlib_torch.devices import device_of, use_device_streams
from commlib_torch.tensor._comparison import note_eager_input, note_returned, takes_notes

_LEAVES = frozenset(("reduce", "reduce_scatter", "scatter", "all_to_all"))
"""Redistributions that end a sharded part of a model: the next one has another input, even in the same tensor."""


def copy(x: Tensor, ranks: AxisRanks) -> Tensor:
    """Return a replicated `x` for a sharded computation: its gradients are summed over the ranks (Megatron's f).

    Args:
        x: A tensor.
        ranks: The ranks of the axis, such as `mesh["tp"]`.

    Examples:
        >>> ct.tensor.copy(torch.ones(2), comm)
        tensor([1., 1.])
    """
    return redistribute(x, axis_of(ranks, "copy"), COPY)


def reduce(x: Tensor, ranks: AxisRanks) -> Tensor:
    """Return the sum of `x` over the ranks, on every rank (Megatron's g). Collective, like the functions below.

    Args:
        x: A tensor.
        ranks: The ranks of the axis, such as `mesh["tp"]`.

    Examples:
        >>> ct.tensor.reduce(torch.ones(2), comm)
        tensor([2., 2.])
    """
    return redistribute(x, axis_of(ranks, "reduce"), REDUCE)


def scatter(x: Tensor, ranks: AxisRanks, dim: int = 0) -> Tensor:
    """Return this rank's shard along `dim` of a replicated `x`. The first ranks have one row more if it is uneven.

    Args:
        x: A tensor.
        ranks: The ranks of the axis, such as `mesh["tp"]`.
        dim: The dimension of the shards.

    Examples:
        >>> ct.tensor.scatter(torch.zeros(4, 3), comm, 0).shape
        torch.Size([2, 3])
    """
    return redistribute(x, axis_of(ranks, "scatter"), moves.scatter(dim))


def gather(x: Tensor, ranks: AxisRanks, dim: int = 0, *, partial: bool = False) -> Tensor:
    """Return the shards of all ranks, joined along `dim`; their lengths may differ.

    Args:
        x: A tensor.
        ranks: The ranks of the axis, such as `mesh["tp"]`.
        dim: The dimension of the shards.
        partial: The result is used differently on each rank, so its gradients are summed.

    Examples:
        >>> ct.tensor.gather(torch.tensor([comm.rank]), comm, 0)
        tensor([0, 1])
    """
    return redistribute(x, axis_of(ranks, "gather"), moves.gather(dim, partial=partial))


def reduce_scatter(x: Tensor, ranks: AxisRanks, dim: int = 0) -> Tensor:
    """Return this rank's shard along `dim` of the sum of `x` over the ranks.

    Args:
        x: A tensor.
        ranks: The ranks of the axis, such as `mesh["tp"]`.
        dim: The dimension of the shards.

    Examples:
        >>> ct.tensor.reduce_scatter(torch.ones(4), comm, 0)
        tensor([2., 2.])
    """
    return redistribute(x, axis_of(ranks, "reduce_scatter"), moves.reduce_scatter(dim))


def all_to_all(x: Tensor, ranks: AxisRanks, divide: int, join: int) -> Tensor:
    """Split `x` along one dimension among the ranks, and join the received pieces along another.

    Args:
        x: A tensor.
        ranks: The ranks of the axis, such as `mesh["tp"]`.
        divide: The dimension along which `x` is split.
        join: The dimension along which received pieces are joined.

    Examples:
        >>> ct.tensor.all_to_all(torch.zeros(2, 4), comm, divide=1, join=0).shape
        torch.Size([4, 2])
    """
    return redistribute(x, axis_of(ranks, "all_to_all"), moves.all_to_all(divide, join))


@disable_compile
def redistribute(
    x: Tensor, axis: ParallelAxis, move: Redistribute, *, may_write: bool = False, layer: Any = None
) -> Tensor:
    """Return a redistributed tensor. may_write: the values of `x` are no longer needed, not even by its gradient.

    layer: the sharded layer that takes `x` unsharded, or returns the result unsharded, if there is one.
    """
    if not isinstance(x, Tensor):
        raise UsageError(f"{move.name}: expected a torch tensor, got {type(x).__name__}")
    if axis.size == 1 and move.name != "all_to_all":
        return x
    if move.name in _LEAVES:
        axis.entered = None
    notes = layer is not None and takes_notes(axis)
    if notes and move.name in ("copy", "scatter"):
        note_eager_input(layer, x)
    try:
        if not (x.requires_grad and torch.is_grad_enabled()):  # as in backward
            return _run(x, axis, move, may_write)[0]
        result: Tensor = _Redistribute.apply(x, axis, move, may_write)  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise explain(error, "sharded layers") from error
    if notes and move.name in ("reduce", "gather"):
        note_returned(layer, result)
    return result


def _run(x: Tensor, axis: ParallelAxis, move: Redistribute, may_write: bool) -> tuple[Tensor, Redistribute]:
    """Return the redistributed tensor, and the operation in the form that its conjugate needs."""
    if move.name == "copy":
        return x, move
    given = pack(x)
    if device_of(given) is not None:
        with use_device_streams():
            result, known = run(axis, move, core_array(given))
            return to_tensor(result), known
    if may_write and move is REDUCE and given.data_ptr() == x.data_ptr() and not _is_observed():
        run(axis, move, array_of(given), may_write=True)
        return x, move
    result, known = run(axis, move, array_of(given))
    return to_tensor(result), known


def _is_observed() -> bool:
    """Return whether a mode intercepts each operation and may keep results, as selective checkpoints do.

    Writes of the core bump no version, so such a mode would miss them.
    """
    return bool(torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack())


class _Redistribute(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: ParallelAxis, move: Redistribute, may_write: bool) -> Tensor:
        ctx.axis = axis
        result, ctx.move = _run(x, axis, move, may_write)
        if result is not x:
            return result
        if move is COPY:
            return x.detach()  # not a view, which would keep `x` itself alive
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return redistribute(gradient, ctx.axis, ctx.move.conjugate), None, None, None
