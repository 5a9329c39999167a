"""Shard lengths along the dimensions that a move splits and joins. Arrays are on the host or on a device."""

from __future__ import annotations

import math
from typing import Any

from commlib.comparison.agreement import agree_on_number
from commlib.errors import UsageError
from commlib.schedule.layout import even
from commlib.sharding.axis import ParallelAxis
from commlib.tensor_parallel.moves import Redistribute


def gather_lengths(axis: ParallelAxis, move: Redistribute, x: Any, dim: int) -> tuple[int, ...]:
    """Return the lengths of all ranks' shards along a dimension; everything else must be equal on all ranks."""
    rest = [*x.shape[:dim], *x.shape[dim + 1 :]]
    lines = [f"{move.name} along {move.dim}", f"dimension {dim}", f"other dimensions: {rest}", f"dtype: {x.dtype}"]
    return agree_on_number(axis.comm, f"{axis.comm.name}: {move.name}", lines, x.shape[dim])


def split_lengths(axis: ParallelAxis, move: Redistribute, x: Any, dim: int) -> tuple[int, ...]:
    """Return the lengths of the shards after a split."""
    lengths = move.lengths or even(x.shape[dim], axis.size).counts
    if len(lengths) != axis.size or sum(lengths) != x.shape[dim]:
        raise UsageError(
            f"{axis.comm.name}: {move.name}: shard lengths {lengths} along dimension {dim} do not fit shape {x.shape}"
        )
    return lengths


def joined_lengths(axis: ParallelAxis, move: Redistribute, x: Any, dim: int, known: tuple[int, ...]) -> tuple[int, ...]:
    """Return the lengths of the shards to join along a dimension: as given, or all-gathered. Raises UsageError."""
    lengths = known or gather_lengths(axis, move, x, dim)
    if len(lengths) != axis.size or lengths[axis.rank] != x.shape[dim]:
        raise UsageError(f"{axis.comm.name}: {move.name}: shards of {lengths}, got {x.shape} on rank {axis.rank}")
    return lengths


def exchange_lengths(
    axis: ParallelAxis, move: Redistribute, x: Any
) -> tuple[int, int, tuple[int, ...], tuple[int, ...]]:
    """Return the dimension that an all_to_all splits, the one that it joins, and the shard lengths along each."""
    divide, join = dimension(move, move.dim, x), dimension(move, move.join, x)
    if divide == join:
        raise UsageError(f"{axis.comm.name}: all_to_all: dimension {divide} cannot be both split and joined")
    return divide, join, split_lengths(axis, move, x, divide), joined_lengths(axis, move, x, join, move.joined)


def dimension(move: Redistribute, dim: int, x: Any) -> int:
    """Return the non-negative index of a dimension of an array. Raises UsageError if it does not exist."""
    if not -x.ndim <= dim < x.ndim:
        raise UsageError(f"{move.name}: an array of shape {x.shape} has no dimension {dim}")
    return dim % int(x.ndim)


def count_around(shape: tuple[int, ...], dim: int) -> tuple[int, int, int]:
    """Return the number of elements before a dimension, in it, and after it."""
    return math.prod(shape[:dim]), shape[dim], math.prod(shape[dim + 1 :])


def replace_length(shape: tuple[int, ...], dim: int, length: int) -> tuple[int, ...]:
    """Return a shape with another length of a dimension."""
    return (*shape[:dim], length, *shape[dim + 1 :])
