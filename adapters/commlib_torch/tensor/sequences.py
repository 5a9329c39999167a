"""Sequences sharded among the ranks of an axis: split, join, batches, and the mean of a loss."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from commlib.comparison.order import note_layout
from commlib.context_parallel import SequenceLayout, document_bounds, sequence_loader
from commlib.context_parallel.sequences import SequenceSpec, check_loss_sum, dimension, settle
from commlib.context_parallel.sequences import position_ids as positions_of
from commlib.literals import SequenceOrder
from commlib.sharding.axis import AxisRanks, ParallelAxis, axis_of
from commlib.tensor_parallel import moves
from commlib.tensor_parallel.moves import REDUCE
from commlib_torch._bridge import dtype_name, host_array, to_tensor
from commlib_torch._graph_breaks import disable_compile
from commlib_torch.tensor.moves import redistribute


def shard_sequence(x: Tensor, ranks: AxisRanks, dim: int = 1, *, layout: SequenceOrder = "balanced") -> Tensor:
    """Return this rank's tokens of full sequences, which every rank has. dim: the dimension of tokens. Not collective.

    The gradient is for this rank's tokens, and zeros for the others.

    Args:
        x: Full sequences, the same on every rank.
        ranks: The ranks of the axis, such as `mesh["cp"]`.
        dim: The dimension of tokens.
        layout: "balanced": an early and a late part of the sequence; "contiguous": one part.

    Examples:
        >>> own = ct.context.shard_sequence(torch.arange(4)[None], comm, layout="contiguous")
        >>> own.tolist() == [[[0, 1]], [[2, 3]]][comm.rank]
        True
    """
    over = axis_of(ranks, "shard_sequence")
    dim = dimension("shard_sequence", x.shape, dim)
    divided = SequenceLayout(x.shape[dim], over.size, layout)
    note_layout(over.comm, layout)
    return take_ranges(x, divided.ranges(over.rank), dim)


@disable_compile
def unshard_sequence(
    x: Tensor,
    ranks: AxisRanks,
    dim: int = 1,
    *,
    layout: SequenceOrder = "balanced",
    length: int | None = None,
    partial: bool = False,
) -> Tensor:
    """Join the tokens of all ranks to full sequences, in order. dim: the dimension of tokens. Collective.

    Args:
        x: This rank's tokens.
        ranks: The ranks of the axis, such as `mesh["cp"]`.
        dim: The dimension of tokens.
        layout: "balanced": an early and a late part of the sequence; "contiguous": one part.
        length: The length of the full sequence; by default the sum of the ranks' tokens.
        partial: The result is used differently on each rank, so its gradients are summed.

    Raises:
        UsageError: On all ranks, if the ranks' tokens do not match the layout.
        MismatchError: If ranks call it differently.

    Examples:
        >>> own = ct.context.shard_sequence(torch.arange(4)[None], comm)
        >>> ct.context.unshard_sequence(own, comm)
        tensor([[0, 1, 2, 3]])
    """
    over, dim = axis_of(ranks, "unshard_sequence"), dimension("unshard_sequence", x.shape, dim)
    terms = SequenceSpec.of_unshard(layout, length, x.shape, dim, dtype_name(x.dtype), partial)
    divided = settle(over, terms, x.shape[dim])
    whole = redistribute(x, over, moves.gather(dim, partial=partial, lengths=divided.counts))
    return take_ranges(whole, divided.in_order, dim)


def position_ids(
    length: int, ranks: AxisRanks, *, layout: SequenceOrder = "balanced", documents: Iterable[int] | None = None
) -> Tensor:
    """Return the positions of this rank's tokens in a sequence of this length, or in their documents, as int64.

    Args:
        length: The length of the full sequence.
        ranks: The ranks of the axis, such as `mesh["cp"]`.
        layout: "balanced": an early and a late part of the sequence; "contiguous": one part.
        documents: The boundaries of packed documents, such as (0, 5, 11); None: one document.

    Examples:
        >>> len(ct.context.position_ids(6, comm))
        3
    """
    over = axis_of(ranks, "position_ids")
    divided = SequenceLayout(length, over.size, layout)
    return to_tensor(positions_of(divided, over.rank, document_bounds(documents, length)))


@disable_compile
def loss_mean(loss_sum: Tensor, n_tokens: int | Tensor, ranks: AxisRanks) -> Tensor:
    """Return the mean loss over the tokens of all ranks, the same on each. Collective.

    The gradient of `loss_sum` is the number of ranks divided by the number of tokens of all ranks: an average of the
    parameters' gradients over the axis, as by `DistributedOptimizer(mesh=)` over dp and cp, then equals the gradient of
    one process.

    Args:
        loss_sum: The sum of the losses of this rank's tokens, one number.
        n_tokens: The number of these tokens, excluding ignored labels, or with class weights the sum of their weights;
            a rank may have 0, and the result is NaN if all do.
        ranks: The ranks of the axis, such as `mesh["cp"]`.

    Examples:
        >>> ct.context.loss_mean(torch.tensor(3.0), 2, comm)
        tensor(1.5000)
    """
    check_loss_sum(loss_sum.shape, dtype_name(loss_sum.dtype))
    counted = torch.as_tensor(n_tokens).detach().to(torch.float64).reshape(())
    # In float64, which counts tokens exactly, and without the axis' codec, which would round.
    sums = torch.stack((loss_sum.to(torch.float64).reshape(()), counted))
    over = ParallelAxis(axis_of(ranks, "loss_mean").comm)
    total, tokens = redistribute(sums.detach(), over, REDUCE)
    own = over.size * sums[0] / tokens
    mean: Tensor = total / tokens + (own - own.detach())
    return mean.to(loss_sum.dtype).reshape(loss_sum.shape)


class SequenceLoader(sequence_loader.SequenceLoader):
    """Iterate over this rank's part of batches of full sequences: see `commlib.context_parallel.sequence_loader`.

    Args:
        batches: An iterable, such as a DataLoader, of mappings of tensors or arrays. The results are tensors.
        ranks: The ranks of the axis, such as `mesh["cp"]`.
        **options: See `commlib.context_parallel.sequence_loader`.
    """

    def __init__(self, batches: Iterable[Any] | None, ranks: AxisRanks, **options: Any) -> None:
        super().__init__(batches, axis_of(ranks, "SequenceLoader"), to_array=_array, from_array=to_tensor, **options)


def _array(value: Any) -> Any:
    if isinstance(value, np.ndarray):  # torch does not accept a read-only array, as of a file
        return value
    return host_array(torch.as_tensor(value))


def take_ranges(x: Tensor, ranges: Sequence[range], dim: int) -> Tensor:
    """Return the rows in these ranges along `dim`, concatenated."""
    if len(ranges) == 1 and len(ranges[0]) == x.shape[dim]:
        return x
    parts = [x.narrow(dim, part.start, len(part)) for part in ranges]
    return torch.cat(parts, dim) if parts else x.narrow(dim, 0, 0)
