"""Lengths: how long shards are along the dimensions that a move divides and joins. Arrays are those of any device."""

from __future__ import annotations

import math
from typing import Any

from commlib.comparison.agreement import told
from commlib.errors import UsageError
from commlib.schedule.layout import even
from commlib.sharding.axis import Axis
from commlib.tensor_parallel.moves import Move


def asked(axis: Axis, move: Move, x: Any, dim: int) -> tuple[int, ...]:
    """Return how long the shards of all ranks are along a dimension: all else must agree."""
    rest = [*x.shape[:dim], *x.shape[dim + 1 :]]
    lines = [f"{move.name} along {move.dim}", f"dimension {dim}", f"other dimensions: {rest}", f"dtype: {x.dtype}"]
    return told(axis.comm, f"{axis.comm.name}: {move.name}", lines, x.shape[dim])


def divided(axis: Axis, move: Move, x: Any, dim: int) -> tuple[int, ...]:
    """Return how long the shards of what all ranks have will be."""
    lengths = move.lengths or even(x.shape[dim], axis.size).counts
    if len(lengths) != axis.size or sum(lengths) != x.shape[dim]:
        raise UsageError(
            f"{axis.comm.name}: {move.name}: shards of {lengths} along dimension {dim} of an array of shape {x.shape}"
        )
    return lengths


def joined_lengths(axis: Axis, move: Move, x: Any, dim: int, given: tuple[int, ...]) -> tuple[int, ...]:
    """Return how long the shards to be joined along a dimension are: as given, or asked for. Raises UsageError."""
    lengths = given or asked(axis, move, x, dim)
    if len(lengths) != axis.size or lengths[axis.rank] != x.shape[dim]:
        raise UsageError(f"{axis.comm.name}: {move.name}: shards of {lengths}, got {x.shape} on rank {axis.rank}")
    return lengths


def exchanged(axis: Axis, move: Move, x: Any) -> tuple[int, int, tuple[int, ...], tuple[int, ...]]:
    """Return which dimension an all_to_all divides and which it joins, and the lengths of the shards along each."""
    divide, join = dimension(move, move.dim, x), dimension(move, move.join, x)
    if divide == join:
        raise UsageError(f"{axis.comm.name}: all_to_all: dimension {divide} cannot be divided and joined at once")
    return divide, join, divided(axis, move, x, divide), joined_lengths(axis, move, x, join, move.joined)


def dimension(move: Move, dim: int, x: Any) -> int:
    """Return a dimension of an array, counted from the front. Raises UsageError if it has none."""
    if not -x.ndim <= dim < x.ndim:
        raise UsageError(f"{move.name}: an array of shape {x.shape} has no dimension {dim}")
    return dim % int(x.ndim)


def around(shape: tuple[int, ...], dim: int) -> tuple[int, int, int]:
    """Return how many elements lie before a dimension, in it and behind it."""
    return math.prod(shape[:dim]), shape[dim], math.prod(shape[dim + 1 :])


def with_length(shape: tuple[int, ...], dim: int, length: int) -> tuple[int, ...]:
    """Return a shape with another length of a dimension."""
    return (*shape[:dim], length, *shape[dim + 1 :])
