"""Sequences divided among the ranks of an axis: cutting them, joining them, batches of them, and the mean of a loss."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from commlib.comparison.order import note_layout
from commlib.context_parallel import Layout, document_bounds, sequence_loader
from commlib.context_parallel.sequences import Terms
from commlib.context_parallel.sequences import position_ids as positions_of
from commlib.errors import UsageError
from commlib.sharding.axis import Axis
from commlib.tensor_parallel import moves
from commlib.tensor_parallel.moves import REDUCE
from commlib_tensorflow._bridge import as_tensor, dtype_name, to_tensor
from commlib_tensorflow._graph import no_autograph, result_empty
from commlib_tensorflow.tensor._agreed import agreed
from commlib_tensorflow.tensor._taken import taken
from commlib_tensorflow.tensor.moves import On, axis_of, moved


@no_autograph
def shard_sequence(x: Any, axis: On, dim: int = 1, *, layout: str = "balanced") -> tf.Tensor:
    """Return this rank's tokens of whole sequences, which every rank has. dim: that of tokens. Not collective.

    The gradient is that of this rank's tokens, zeros elsewhere.
    """
    x, over = as_tensor(x), axis_of(axis)
    dim = _dim("shard_sequence", x, dim)
    if x.shape[dim] is None:
        raise UsageError(
            f"shard_sequence: dimension {dim} of shape {x.shape} must be known: cut batches before a graph"
        )
    divided = Layout(x.shape[dim], over.size, layout)
    note_layout(over.comm, layout)
    return taken(x, divided.ranges(over.rank), dim)


@no_autograph
def unshard_sequence(
    x: Any, axis: On, dim: int = 1, *, layout: str = "balanced", length: int | None = None, partial: bool = False
) -> tf.Tensor:
    """Return whole sequences, in order, of the tokens of all ranks. dim: that of tokens. Collective.

    length: of the whole; in a graph it has to be given, else it is what the ranks' tokens add up to. partial: what is
    computed with the result differs from rank to rank, so that its gradients are added up. Raises UsageError, on all
    ranks, if the ranks' tokens are not those of the layout, MismatchError if ranks call it differently.
    """
    x, over = as_tensor(x), axis_of(axis)
    dim = _dim("unshard_sequence", x, dim)
    rest = {
        "dimension": dim, "other dimensions": [*x.shape[:dim], *x.shape[dim + 1 :]], "dtype": dtype_name(x.dtype),
        "partial": partial,
    }  # fmt: skip
    divided, x, _ = agreed(over, Terms.of("unshard_sequence", layout, length, None, rest), x, dim)
    whole = moved(x, over, moves.gather(dim, partial=partial, lengths=divided.counts))
    return taken(whole, divided.in_order, dim)


def position_ids(
    length: int, axis: On, *, layout: str = "balanced", documents: Iterable[int] | None = None
) -> tf.Tensor:
    """Return the positions of this rank's tokens in a sequence of some length, or in their documents, as int64."""
    over = axis_of(axis)
    divided = Layout(length, over.size, layout)
    return tf.constant(positions_of(divided, over.rank, document_bounds(documents, length)))


@no_autograph
def loss_mean(loss_sum: Any, n_tokens: Any, axis: On) -> tf.Tensor:
    """Return the mean loss over the tokens of all ranks, the same on each. Collective.

    loss_sum: the sum of the losses of this rank's tokens, one number. n_tokens: how many these are, such as those whose
    label is not ignored, or with class weights what their weights add up to; 0 is right for a rank without any, and NaN
    comes out if all have none. The gradient of `loss_sum` is the number of ranks over the tokens of all, so that the
    average over the axis of the gradients of variables, as `DistributedOptimizer(mesh=)` takes it over dp and cp, is
    that of one process.
    """
    loss_sum = as_tensor(loss_sum)
    if loss_sum.shape.num_elements() != 1 or not loss_sum.dtype.is_floating:
        raise UsageError(
            f"loss_mean: loss_sum has shape {loss_sum.shape} and dtype {dtype_name(loss_sum.dtype)}, expected one "
            "float: the sum over this rank's tokens"
        )
    # In float64, which counts tokens exactly, and without the axis' codec, which would not.
    both = [tf.reshape(tf.cast(x, tf.float64), ()) for x in (loss_sum, tf.convert_to_tensor(n_tokens))]
    over = Axis(axis_of(axis).comm, empty=result_empty)
    total, tokens = map(tf.stop_gradient, tf.unstack(moved(tf.stack(both), over, REDUCE)))
    own = over.size * both[0] / tokens
    mean = total / tokens + (own - tf.stop_gradient(own))
    return tf.reshape(tf.cast(mean, loss_sum.dtype), loss_sum.shape)


class SequenceLoader(sequence_loader.SequenceLoader):
    """Iterate over this rank's part of batches of whole sequences: see `commlib.context_parallel.sequence_loader`.

    batches: any iterable, such as a tf.data.Dataset, of mappings of tensors or arrays. Tensors come out.
    """

    def __init__(self, batches: Iterable[Any] | None, axis: On, **options: Any) -> None:
        super().__init__(batches, axis_of(axis), from_array=to_tensor, **options)


def _dim(what: str, x: tf.Tensor, dim: int) -> int:
    if x.shape.rank is None or not -x.shape.rank <= dim < x.shape.rank:
        raise UsageError(f"{what}: a tensor of shape {x.shape} has no dimension {dim}")
    return dim % int(x.shape.rank)
