"""Moves of tensors over an axis, with their gradients: see `commlib.tensor_parallel.moves` for what each does."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from commlib.communicator import Communicator
from commlib.errors import UsageError
from commlib.sharding.axis import Axis
from commlib.tensor_parallel import moves
from commlib.tensor_parallel.moves import COPY, REDUCE, Move
from commlib.tensor_parallel.run.moves import run
from commlib_torch._bridge import array_of, core_array, packed, to_tensor
from commlib_torch._uncompiled import uncompiled
from commlib_torch.devices import device_of, in_order
from commlib_torch.tensor._alike import note_given, note_returned, takes_notes

On = Axis | Communicator
"""The ranks of an axis: `mesh["tp"]`, or an Axis."""


_LEAVES = frozenset(("reduce", "reduce_scatter", "scatter", "all_to_all"))
"""Moves by which a part of a model ends: what comes then has another input, whatever tensor that is in."""


def copy(x: Tensor, axis: On) -> Tensor:
    """Return `x`, which is whole on every rank, for what differs from rank to rank: its gradients are added up."""
    return moved(x, axis_of(axis), COPY)


def reduce(x: Tensor, axis: On) -> Tensor:
    """Return the sum of `x` over the ranks, whole on each. Collective, as are those below."""
    return moved(x, axis_of(axis), REDUCE)


def scatter(x: Tensor, axis: On, dim: int = 0) -> Tensor:
    """Return this rank's shard of `x` along `dim`, of what all ranks have. The first ranks have one row more."""
    return moved(x, axis_of(axis), moves.scatter(dim))


def gather(x: Tensor, axis: On, dim: int = 0, *, partial: bool = False) -> Tensor:
    """Return the shards of all ranks, joined along `dim`; their lengths may differ.

    partial: what is computed with the result differs from rank to rank, so that its gradients are added up.
    """
    return moved(x, axis_of(axis), moves.gather(dim, partial=partial))


def reduce_scatter(x: Tensor, axis: On, dim: int = 0) -> Tensor:
    """Return this rank's shard along `dim` of the sum of `x` over the ranks."""
    return moved(x, axis_of(axis), moves.reduce_scatter(dim))


def all_to_all(x: Tensor, axis: On, divide: int, join: int) -> Tensor:
    """Divide `x` along one dimension among the ranks, and join along another one what they have sent."""
    return moved(x, axis_of(axis), moves.all_to_all(divide, join))


def axis_of(axis: On) -> Axis:
    """Return an Axis over a communicator."""
    return axis if isinstance(axis, Axis) else Axis(axis)


@uncompiled
def moved(x: Tensor, axis: Axis, move: Move, *, may_write: bool = False, layer: Any = None) -> Tensor:
    """Return a moved tensor. may_write: nobody needs the values of `x`, not even its own gradient.

    layer: the divided layer that takes `x` whole, or returns the result so, if one does.
    """
    if axis.size == 1 and move.name != "all_to_all":
        return x
    if move.name in _LEAVES:
        axis.entered = None
    notes = layer is not None and takes_notes(axis)
    if notes and move.name in ("copy", "scatter"):
        note_given(layer, x)
    try:
        if not (x.requires_grad and torch.is_grad_enabled()):  # as in backward
            return _run(x, axis, move, may_write)[0]
        found: Tensor = _Moved.apply(x, axis, move, may_write)  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise explained(error) from error
    if notes and move.name in ("reduce", "gather"):
        note_returned(layer, found)
    return found


def explained(error: RuntimeError) -> Exception:
    """Return what to raise for an error of PyTorch: a UsageError for a transform of torch.func, around what travels."""
    if "functorch transforms" in f"{error}" or "doesn't have storage" in f"{error}":
        return UsageError(
            "transforms of functions (torch.func.grad, vmap, jvp, ...) cannot be put around layers that are divided: "
            "what travels between ranks is no function of tensors alone. Use torch.autograd.grad, with "
            "create_graph=True for gradients of gradients"
        )
    return error


def _run(x: Tensor, axis: Axis, move: Move, may_write: bool) -> tuple[Tensor, Move]:
    """Return the moved tensor, and the move as its conjugate needs it."""
    if move.name == "copy":
        return x, move
    given = packed(x)
    if device_of(given) is not None:
        with in_order():
            result, known = run(axis, move, core_array(given))
            return to_tensor(result), known
    if may_write and move is REDUCE and given.data_ptr() == x.data_ptr() and not _is_observed():
        run(axis, move, array_of(given), may_write=True)
        return x, move
    result, known = run(axis, move, array_of(given))
    return to_tensor(result), known


def _is_observed() -> bool:
    """Return whether a mode sees each operation, and may keep results, as selective checkpoints do.

    What is written here bumps no version, so that nobody would notice.
    """
    return bool(torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack())


class _Moved(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, move: Move, may_write: bool) -> Tensor:
        ctx.axis = axis
        result, ctx.move = _run(x, axis, move, may_write)
        if result is not x:
            return result
        if move is COPY:
            return x.detach()  # no view: that would keep `x` itself
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return moved(gradient, ctx.axis, ctx.move.conjugate), None, None, None
