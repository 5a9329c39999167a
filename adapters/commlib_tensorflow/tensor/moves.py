"""Collectives on tensors over an axis, with their gradients: see `commlib.tensor_parallel.moves` for each.

Each is one graph node, which calls the host, or works on GPU tensors in place. Nodes run in the order in which they are
made, the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from commlib.errors import UsageError
from commlib.schedule.layout import even
from commlib.sharding import axis as sharding_axis
from commlib.sharding.axis import AxisRanks, ParallelAxis
from commlib.tensor_parallel import moves
from commlib.tensor_parallel.moves import COPY, REDUCE, Redistribute
from commlib.tensor_parallel.run.moves import run
from commlib_tensorflow._bridge import Array, as_tensor
from commlib_tensorflow._device_calls import call_on_device
from commlib_tensorflow._host_calls import Spec, no_autograph, refuse_vectorized, result_empty
from commlib_tensorflow.tensor._comparison import note_gradient


@no_autograph
def copy(x: Any, ranks: AxisRanks) -> tf.Tensor:
    """Return `x`, replicated on every rank, for use in rank-dependent computation: its gradients are summed.

    Args:
        x: A tensor.
        ranks: The ranks of the axis, such as `mesh["tp"]`.

    Examples:
        >>> ct.tensor.copy(tf.ones([2]), comm).numpy()
        array([1., 1.], dtype=float32)
    """
    return redistribute(as_tensor(x, "copy"), axis_of(ranks, "copy"), COPY)


@no_autograph
def reduce(x: Any, ranks: AxisRanks) -> tf.Tensor:
    """Return the sum of `x` over the ranks, on each rank. Collective, like the following functions.

    Args:
        x: A tensor.
        ranks: The ranks of the axis, such as `mesh["tp"]`.

    Examples:
        >>> ct.tensor.reduce(tf.ones([2]), comm).numpy()
        array([2., 2.], dtype=float32)
    """
    return redistribute(as_tensor(x, "reduce"), axis_of(ranks, "reduce"), REDUCE)


@no_autograph
def scatter(x: Any, ranks: AxisRanks, dim: int = 0) -> tf.Tensor:
    """Return this rank's shard along `dim` of `x`, which is replicated. The first ranks have one row more.

    Args:
        x: A tensor.
        ranks: The ranks of the axis, such as `mesh["tp"]`.
        dim: The dimension of the shards.

    Examples:
        >>> ct.tensor.scatter(tf.zeros([4, 3]), comm, 0).shape.as_list()
        [2, 3]
    """
    return redistribute(as_tensor(x, "scatter"), axis_of(ranks, "scatter"), moves.scatter(dim))


@no_autograph
def gather(x: Any, ranks: AxisRanks, dim: int = 0, *, partial: bool = False) -> tf.Tensor:
    """Return the shards of all ranks, concatenated along `dim`; their lengths may differ.

    Args:
        x: A tensor.
        ranks: The ranks of the axis, such as `mesh["tp"]`.
        dim: The dimension of the shards.
        partial: The result is used in rank-dependent computation, so its gradients are summed.

    Examples:
        >>> ct.tensor.gather(tf.constant([comm.rank]), comm, 0).numpy()
        array([0, 1], dtype=int32)
    """
    return redistribute(as_tensor(x, "gather"), axis_of(ranks, "gather"), moves.gather(dim, partial=partial))


@no_autograph
def reduce_scatter(x: Any, ranks: AxisRanks, dim: int = 0) -> tf.Tensor:
    """Return this rank's shard along `dim` of the sum of `x` over the ranks.

    Args:
        x: A tensor.
        ranks: The ranks of the axis, such as `mesh["tp"]`.
        dim: The dimension of the shards.

    Examples:
        >>> ct.tensor.reduce_scatter(tf.ones([4]), comm, 0).numpy()
        array([2., 2.], dtype=float32)
    """
    return redistribute(as_tensor(x, "reduce_scatter"), axis_of(ranks, "reduce_scatter"), moves.reduce_scatter(dim))


@no_autograph
def all_to_all(x: Any, ranks: AxisRanks, divide: int, join: int) -> tf.Tensor:
    """Split `x` along dimension `divide` over the ranks, and concatenate the received parts along `join`.

    Args:
        x: A tensor.
        ranks: The ranks of the axis, such as `mesh["tp"]`.
        divide: The dimension along which `x` is split.
        join: The dimension along which received pieces are joined.

    Examples:
        >>> ct.tensor.all_to_all(tf.zeros([2, 4]), comm, divide=1, join=0).shape.as_list()
        [4, 2]
    """
    return redistribute(as_tensor(x, "all_to_all"), axis_of(ranks, "all_to_all"), moves.all_to_all(divide, join))


def axis_of(ranks: AxisRanks, verb: str) -> ParallelAxis:
    """Return the axis over `ranks`, with results in memory that TensorFlow takes over."""
    return sharding_axis.axis_of(ranks, verb, empty=result_empty)


def redistribute(
    x: tf.Tensor, axis: ParallelAxis, move: Redistribute, lengths: Any = None, *, layer: Any = None
) -> tf.Tensor:
    """Apply a move to a tensor. lengths: a tensor with the lengths of the shards, if known only at run time.

    layer: the sharded layer that returns the full result, if any.
    """
    if axis.size == 1 and move.name != "all_to_all":
        return x
    refuse_vectorized()
    return _apply(x, axis, move, lengths, layer)


def _apply(x: tf.Tensor, axis: ParallelAxis, move: Redistribute, lengths: Any = None, layer: Any = None) -> tf.Tensor:
    _check_dims(move, x)
    if lengths is None:
        move = _with_known_lengths(axis, move, x)

    def moving(x: tf.Tensor) -> tuple[tf.Tensor, Any]:
        if move.name == "copy":
            return tf.identity(x), lambda gradient: _apply(as_tensor(gradient), axis, REDUCE)
        if move.name == "reduce":
            (result,) = call_on_device(lambda array: [run(axis, move, array)[0]], [x], [Spec.like(x)], what=move.name)
            return result, lambda gradient: _apply(noted(gradient), axis, COPY)
        result, note = _node(x, axis, move, lengths)
        return result, lambda gradient: _apply(noted(gradient), axis, move.conjugate, note)

    def noted(gradient: Any) -> tf.Tensor:
        gradient = as_tensor(gradient)
        note_gradient(axis, layer, gradient)
        return gradient

    return tf.custom_gradient(moving)(x)


def _node(x: tf.Tensor, axis: ParallelAxis, move: Redistribute, lengths: Any) -> tuple[tf.Tensor, Any]:
    """Return the result, and the lengths of the shards if unknown before: for all_to_all of both dimensions."""
    spec = Spec(x.dtype, _shape(axis, move, x))
    if move.lengths and (move.joined or move.name != "all_to_all"):
        (result,) = call_on_device(lambda array: [run(axis, move, array)[0]], [x], [spec], what=move.name)
        return result, None

    def host(array: Any, *given: Array) -> Sequence[Any]:
        result, known = run(axis, _with_lengths(move, given[0]) if given else move, array)
        return [result, np.array([*known.lengths, *known.joined], np.int64)]

    count = axis.size * (1 + (move.name == "all_to_all"))
    inputs = [x] if lengths is None else [x, lengths]
    result, note = call_on_device(host, inputs, [spec, Spec(tf.int64, (count,))], host=1, what=move.name)
    return result, note


def _with_lengths(move: Redistribute, lengths: Array) -> Redistribute:
    """Return a move with the lengths that the forward move has found: for all_to_all in swapped order."""
    given = tuple(map(int, lengths))
    if move.name != "all_to_all":
        return move.with_lengths(given)
    half = len(given) // 2
    return move.with_lengths(given[half:], given[:half])


def _check_dims(move: Redistribute, x: tf.Tensor) -> None:
    rank = x.shape.rank
    for dim in () if rank is None or move.name in ("copy", "reduce") else (move.dim, move.join):
        if not -rank <= dim < rank:
            raise UsageError(f"{move.name}: a tensor of shape {x.shape} has no dimension {dim}")


def _with_known_lengths(axis: ParallelAxis, move: Redistribute, x: tf.Tensor) -> Redistribute:
    """Return the move with the lengths that follow from a known shape."""
    if move.lengths or move.name not in ("scatter", "reduce_scatter") or x.shape.rank is None:
        return move
    length = x.shape[move.dim]
    return move if length is None else move.with_lengths(even(length, axis.size).counts)


def _shape(axis: ParallelAxis, move: Redistribute, x: tf.Tensor) -> tf.TensorShape:
    """Return the result's shape as far as it is known."""
    if x.shape.rank is None:
        return x.shape
    shape = x.shape.as_list()
    if move.name == "all_to_all":
        length = shape[move.dim]
        divided = move.lengths or (even(length, axis.size).counts if length is not None else ())
        shape[move.dim] = divided[axis.rank] if divided else None
        shape[move.join] = sum(move.joined) if move.joined else None
    elif move.name in ("gather", "gather_partial"):
        shape[move.dim] = sum(move.lengths) if move.lengths else None
    else:
        shape[move.dim] = move.lengths[axis.rank] if move.lengths else None
    return tf.TensorShape(shape)
