"""Sequences divided among the ranks of an axis: cutting them, joining them, batches of them, and the mean of a loss."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from commlib.comparison.order import note_layout
from commlib.context_parallel import Layout, document_bounds, sequence_loader
from commlib.context_parallel.sequences import Terms, settle
from commlib.context_parallel.sequences import position_ids as positions_of
from commlib.errors import UsageError
from commlib.sharding.axis import Axis
from commlib.tensor_parallel import moves
from commlib.tensor_parallel.moves import REDUCE
from commlib_torch._bridge import dtype_name, host_array, to_tensor
from commlib_torch._uncompiled import uncompiled
from commlib_torch.tensor._taken import taken
from commlib_torch.tensor.moves import On, axis_of, moved


def shard_sequence(x: Tensor, axis: On, dim: int = 1, *, layout: str = "balanced") -> Tensor:
    """Return this rank's tokens of whole sequences, which every rank has. dim: that of tokens. Not collective.

    The gradient is that of this rank's tokens, zeros elsewhere.
    """
    over = axis_of(axis)
    dim = _dim("shard_sequence", x, dim)
    divided = Layout(x.shape[dim], over.size, layout)
    note_layout(over.comm, layout)
    return taken(x, divided.ranges(over.rank), dim)


@uncompiled
def unshard_sequence(
    x: Tensor, axis: On, dim: int = 1, *, layout: str = "balanced", length: int | None = None, partial: bool = False
) -> Tensor:
    """Return whole sequences, in order, of the tokens of all ranks. dim: that of tokens. Collective.

    length: of the whole, by default what the ranks' tokens add up to. partial: what is computed with the result differs
    from rank to rank, so that its gradients are added up. Raises UsageError, on all ranks, if the ranks' tokens are not
    those of the layout, MismatchError if ranks call it differently.
    """
    over, dim = axis_of(axis), _dim("unshard_sequence", x, dim)
    rest = {
        "dimension": dim, "other dimensions": [*x.shape[:dim], *x.shape[dim + 1 :]], "dtype": dtype_name(x.dtype),
        "partial": partial,
    }  # fmt: skip
    divided = settle(over, Terms.of("unshard_sequence", layout, length, None, rest), x.shape[dim])
    whole = moved(x, over, moves.gather(dim, partial=partial, lengths=divided.counts))
    return taken(whole, divided.in_order, dim)


def position_ids(length: int, axis: On, *, layout: str = "balanced", documents: Iterable[int] | None = None) -> Tensor:
    """Return the positions of this rank's tokens in a sequence of some length, or in their documents, as int64."""
    over = axis_of(axis)
    divided = Layout(length, over.size, layout)
    return to_tensor(positions_of(divided, over.rank, document_bounds(documents, length)))


@uncompiled
def loss_mean(loss_sum: Tensor, n_tokens: int | Tensor, axis: On) -> Tensor:
    """Return the mean loss over the tokens of all ranks, the same on each. Collective.

    loss_sum: the sum of the losses of this rank's tokens, one number. n_tokens: how many these are, such as those whose
    label is not ignored, or with class weights what their weights add up to; 0 is right for a rank without any, and NaN
    comes out if all have none. The gradient of `loss_sum` is the number of ranks over the tokens of all, so that the
    average over the axis of the gradients of parameters, as `DistributedOptimizer(mesh=)` takes it over dp and cp, is
    that of one process.
    """
    if loss_sum.numel() != 1 or not loss_sum.is_floating_point():
        raise UsageError(
            f"loss_mean: loss_sum has shape {list(loss_sum.shape)} and dtype {dtype_name(loss_sum.dtype)}, expected "
            "one float: the sum over this rank's tokens (reduction='sum')"
        )
    counted = torch.as_tensor(n_tokens).detach().to(torch.float64).reshape(())
    # In float64, which counts tokens exactly, and without the axis' codec, which would not.
    sums = torch.stack((loss_sum.to(torch.float64).reshape(()), counted))
    over = Axis(axis_of(axis).comm)
    total, tokens = moved(sums.detach(), over, REDUCE)
    own = over.size * sums[0] / tokens
    mean: Tensor = total / tokens + (own - own.detach())
    return mean.to(loss_sum.dtype).reshape(loss_sum.shape)


class SequenceLoader(sequence_loader.SequenceLoader):
    """Iterate over this rank's part of batches of whole sequences: see `commlib.context_parallel.sequence_loader`.

    batches: any iterable, such as a DataLoader, of mappings of tensors or arrays. Tensors come out.
    """

    def __init__(self, batches: Iterable[Any] | None, axis: On, **options: Any) -> None:
        super().__init__(batches, axis_of(axis), to_array=_array, from_array=to_tensor, **options)


def _array(value: Any) -> Any:
    if isinstance(value, np.ndarray):  # one that must not be written, as of a file, is none of torch's
        return value
    return host_array(torch.as_tensor(value))


def _dim(what: str, x: Tensor, dim: int) -> int:
    if not -x.ndim <= dim < x.ndim:
        raise UsageError(f"{what}: a tensor of shape {list(x.shape)} has no dimension {dim}")
    return dim % x.ndim
