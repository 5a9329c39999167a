"""Sequences sharded over the ranks of an axis: shard and gather them, load batches of them, and average a loss."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from commlib.comparison.order import note_layout
from commlib.context_parallel import SequenceLayout, document_bounds, sequence_loader
from commlib.context_parallel.sequences import SequenceSpec, check_loss_sum, dimension
from commlib.context_parallel.sequences import position_ids as positions_of
from commlib.errors import UsageError
from commlib.literals import SequenceOrder
from commlib.sharding.axis import AxisRanks, ParallelAxis
from commlib.tensor_parallel import moves
from commlib.tensor_parallel.moves import REDUCE
from commlib_tensorflow._bridge import as_tensor, dtype_name, to_tensor
from commlib_tensorflow._host_calls import no_autograph, result_empty
from commlib_tensorflow.tensor._agreement import agree_on_sequence
from commlib_tensorflow.tensor.moves import axis_of, redistribute


@no_autograph
def shard_sequence(x: Any, ranks: AxisRanks, dim: int = 1, *, layout: SequenceOrder = "balanced") -> tf.Tensor:
    """Return this rank's tokens of whole sequences, which every rank has. dim: the dimension of tokens. Not collective.

    The gradient is for this rank's tokens, zeros elsewhere.

    Args:
        x: Full sequences, the same on every rank.
        ranks: The ranks of the axis, such as `mesh["cp"]`.
        dim: The dimension of tokens.
        layout: "balanced": an early and a late part of the sequence; "contiguous": one part.

    Examples:
        >>> own = ct.context.shard_sequence(tf.range(4)[None], comm, layout="contiguous")
        >>> own.numpy().tolist() == [[[0, 1]], [[2, 3]]][comm.rank]
        True
    """
    x, over = as_tensor(x), axis_of(ranks, "shard_sequence")
    dim = dimension("shard_sequence", _shape(x), dim)
    if x.shape[dim] is None:
        raise UsageError(
            f"shard_sequence: dimension {dim} of shape {x.shape} must be known: shard batches before the graph"
        )
    divided = SequenceLayout(x.shape[dim], over.size, layout)
    note_layout(over.comm, layout)
    return take_ranges(x, divided.ranges(over.rank), dim)


@no_autograph
def unshard_sequence(
    x: Any,
    ranks: AxisRanks,
    dim: int = 1,
    *,
    layout: SequenceOrder = "balanced",
    length: int | None = None,
    partial: bool = False,
) -> tf.Tensor:
    """Return whole sequences, in order, from the tokens of all ranks. dim: the dimension of tokens. Collective.

    Args:
        x: This rank's tokens.
        ranks: The ranks of the axis, such as `mesh["cp"]`.
        dim: The dimension of tokens.
        layout: "balanced": an early and a late part of the sequence; "contiguous": one part.
        length: The length of the whole sequence; required in a graph, otherwise the sum of the ranks' tokens.
        partial: The result is used in rank-dependent computation, so its gradients are summed.

    Raises:
        UsageError: On all ranks, if the numbers of tokens do not match the layout.
        MismatchError: If ranks call it with different arguments.

    Examples:
        >>> own = ct.context.shard_sequence(tf.range(4)[None], comm)
        >>> ct.context.unshard_sequence(own, comm).numpy()
        array([[0, 1, 2, 3]], dtype=int32)
    """
    x, over = as_tensor(x), axis_of(ranks, "unshard_sequence")
    dim = dimension("unshard_sequence", _shape(x), dim)
    terms = SequenceSpec.of_unshard(layout, length, x.shape, dim, dtype_name(x.dtype), partial)
    divided, x, _ = agree_on_sequence(over, terms, x, dim)
    whole = redistribute(x, over, moves.gather(dim, partial=partial, lengths=divided.counts))
    return take_ranges(whole, divided.in_order, dim)


def position_ids(
    length: int, ranks: AxisRanks, *, layout: SequenceOrder = "balanced", documents: Iterable[int] | None = None
) -> tf.Tensor:
    """Return the positions of this rank's tokens in a sequence of a given length, or in their documents, as int64.

    Args:
        length: The length of the full sequence.
        ranks: The ranks of the axis, such as `mesh["cp"]`.
        layout: "balanced": an early and a late part of the sequence; "contiguous": one part.
        documents: The boundaries of packed documents, such as (0, 5, 11); None: one document.
    """
    over = axis_of(ranks, "position_ids")
    divided = SequenceLayout(length, over.size, layout)
    return tf.constant(positions_of(divided, over.rank, document_bounds(documents, length)))


@no_autograph
def loss_mean(loss_sum: Any, n_tokens: Any, ranks: AxisRanks) -> tf.Tensor:
    """Return the mean loss over the tokens of all ranks, the same on each. Collective.

    The gradient of `loss_sum` is the number of ranks divided by the total number of tokens, so the average of
    variables' gradients over the axis, as `DistributedOptimizer(mesh=)` takes it over dp and cp, is that of one
    process.

    Args:
        loss_sum: The sum of the losses of this rank's tokens, a scalar.
        n_tokens: The number of tokens in it, such as those whose label is not ignored, or with class weights the sum of
            their weights; pass 0 on a rank without any; the result is NaN if all ranks pass 0.
        ranks: The ranks of the axis, such as `mesh["cp"]`.
    """
    loss_sum = as_tensor(loss_sum)
    check_loss_sum(_shape(loss_sum), dtype_name(loss_sum.dtype))
    # In float64, which counts tokens exactly, and without the axis' codec, which would round.
    both = [tf.reshape(tf.cast(x, tf.float64), ()) for x in (loss_sum, tf.convert_to_tensor(n_tokens))]
    over = ParallelAxis(axis_of(ranks, "loss_mean").comm, empty=result_empty)
    total, tokens = map(tf.stop_gradient, tf.unstack(redistribute(tf.stack(both), over, REDUCE)))
    own = over.size * both[0] / tokens
    mean = total / tokens + (own - tf.stop_gradient(own))
    return tf.reshape(tf.cast(mean, loss_sum.dtype), loss_sum.shape)


class SequenceLoader(sequence_loader.SequenceLoader):
    """Iterate over this rank's shard of batches of whole sequences: see `commlib.context_parallel.sequence_loader`.

    Args:
        batches: Any iterable, such as a tf.data.Dataset, of mappings of tensors or arrays. It yields tensors.
        ranks: The ranks of the axis, such as `mesh["cp"]`.
        **options: See `commlib.context_parallel.sequence_loader`.
    """

    def __init__(self, batches: Iterable[Any] | None, ranks: AxisRanks, **options: Any) -> None:
        super().__init__(batches, axis_of(ranks, "SequenceLoader"), from_array=to_tensor, **options)


def _shape(x: tf.Tensor) -> list[int | None] | None:
    return None if x.shape.rank is None else x.shape.as_list()


def take_ranges(x: tf.Tensor, ranges: Sequence[range], dim: int) -> tf.Tensor:
    """Return the rows in these ranges along `dim`, concatenated."""
    if len(ranges) == 1 and len(ranges[0]) == x.shape[dim]:
        return x
    front = (slice(None),) * dim
    parts = [x[(*front, slice(part.start, part.stop))] for part in ranges]
    return tf.concat(parts, dim) if parts else x[(*front, slice(0, 0))]
