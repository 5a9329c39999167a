"""Redistribution of arrays: run a `commlib.tensor_parallel.Redistribute` over an axis."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from commlib.devices.array import DeviceArray
from commlib.devices.copies import copy_to_device
from commlib.dtypes import Array
from commlib.p2p.lanes.staging import stage_to_host
from commlib.schedule.layout import uneven
from commlib.sharding.axis import ParallelAxis
from commlib.tensor_parallel.moves import Redistribute
from commlib.tensor_parallel.run.device_moves import run_on_device
from commlib.tensor_parallel.run.lengths import (
    count_around,
    dimension,
    exchange_lengths,
    joined_lengths,
    replace_length,
    split_lengths,
)


def run(axis: ParallelAxis, move: Redistribute, x: Any, *, may_write: bool = False) -> tuple[Any, Redistribute]:
    """Return (the moved array, the move with the lengths of all shards, which its conjugate needs).

    Collective over the axis, except "copy" and "scatter", which are local. The result is contiguous, and new unless
    nothing changes, or `may_write` to `x`. Raises UsageError for a dimension or lengths that do not fit. x: a numpy
    array, or a DeviceArray: then the result is one, too, and on the current stream.
    """
    if type(x) is DeviceArray:
        if move.name in ("copy", "scatter") or axis.wire(x.dtype).is_plain:
            return run_on_device(axis, move, x, may_write=may_write)
        on_host = stage_to_host(axis.comm.group.waits, x, move.name)  # codecs of moves run on the host
        result, known = run(axis, move, on_host)
        return copy_to_device(result, x.device), known
    if move.name == "copy" or (axis.size == 1 and move.name != "all_to_all"):
        return _contiguous(x), move
    if move.name == "reduce":
        x = _contiguous(x)
        return axis.wire(x.dtype).all_reduce(x, out=x if may_write else axis.empty(x.shape, x.dtype)), move
    return _RUN[move.name](axis, move, x)


def _contiguous(x: Array) -> Array:
    return np.asarray(x, order="C")  # np.ascontiguousarray gives a number a dimension


def start(axis: ParallelAxis, move: Redistribute, x: Array) -> Callable[[], Array]:
    """Start "reduce" or "reduce_scatter", the moves of gradients; return a function that waits for the result.

    With a codec, or with dimensions to reorder, the move runs at once. `x`, a numpy array, must not change meanwhile.
    """
    comm, is_plain = axis.comm, axis.wire(x.dtype).is_plain
    if move.name == "reduce" and is_plain:
        work = comm.all_reduce_async(_contiguous(x), out=axis.empty(x.shape, x.dtype))
        return work.wait
    if (
        move.name == "reduce_scatter"
        and is_plain
        and count_around(x.shape, dim := dimension(move, move.dim, x))[0] == 1
    ):
        lengths = split_lengths(axis, move, x, dim)
        _, length, tail = count_around(x.shape, dim)
        shape, front = replace_length(x.shape, dim, lengths[axis.rank]), np.ascontiguousarray(x).reshape(length, tail)
        out = axis.empty((lengths[axis.rank], tail), x.dtype)
        work = comm.reduce_scatter_v_async(front, lengths, out=out)
        return lambda: work.wait().reshape(shape)
    result, _ = run(axis, move, x)
    return lambda: result


def _scatter(axis: ParallelAxis, move: Redistribute, x: Array) -> tuple[Array, Redistribute]:
    dim = dimension(move, move.dim, x)
    lengths = split_lengths(axis, move, x, dim)
    start, stop = uneven(lengths).slice_of(axis.rank)
    shard = x[(slice(None),) * dim + (slice(start, stop),)]
    return _copy(axis, shard), move.with_lengths(lengths)


def _gather(axis: ParallelAxis, move: Redistribute, x: Array) -> tuple[Array, Redistribute]:
    dim = dimension(move, move.dim, x)
    lengths = joined_lengths(axis, move, x, dim, move.lengths)
    lead, own, tail = count_around(x.shape, dim)
    shape = replace_length(x.shape, dim, sum(lengths))
    if len(set(lengths)) > 1:
        front = np.ascontiguousarray(np.moveaxis(x, dim, 0))
        gathered = axis.wire(x.dtype).all_gather_v(front, lengths)
        whole = gathered if lead == 1 else _copy(axis, np.moveaxis(gathered, 0, dim))
    elif lead == 1:
        flat = np.ascontiguousarray(x).reshape(own, tail)
        whole = axis.wire(x.dtype).all_gather(flat, out=axis.empty((own * axis.size, tail), x.dtype))
    else:  # gather the shards one after another, then reorder
        gathered = axis.wire(x.dtype).all_gather(np.ascontiguousarray(x).reshape(1, -1))
        whole = _copy(axis, gathered.reshape(axis.size, lead, own, tail).transpose(1, 0, 2, 3))
    return whole.reshape(shape), move.with_lengths(lengths)


def _reduce_scatter(axis: ParallelAxis, move: Redistribute, x: Array) -> tuple[Array, Redistribute]:
    dim = dimension(move, move.dim, x)
    lengths = split_lengths(axis, move, x, dim)
    lead, _, _ = count_around(x.shape, dim)
    front = np.ascontiguousarray(np.moveaxis(x, dim, 0))
    out = axis.empty((lengths[axis.rank], *front.shape[1:]), x.dtype)
    axis.wire(x.dtype).reduce_scatter_v(front, lengths, out=out)
    shard = out if lead == 1 else _copy(axis, np.moveaxis(out, 0, dim))
    return shard.reshape(replace_length(x.shape, dim, lengths[axis.rank])), move.with_lengths(lengths)


def _all_to_all(axis: ParallelAxis, move: Redistribute, x: Array) -> tuple[Array, Redistribute]:
    divide, join, lengths, joined = exchange_lengths(axis, move, x)
    rest = math.prod(length for dim, length in enumerate(x.shape) if dim not in (divide, join))
    packed = np.empty(x.size, x.dtype)
    at, cuts = 0, uneven(lengths)
    for peer in range(axis.size):
        start, stop = cuts.slice_of(peer)
        part = x[(slice(None),) * divide + (slice(start, stop),)]
        packed[at : at + part.size].reshape(part.shape)[...] = part
        at += part.size
    splits = [length * x.shape[join] * rest for length in lengths]
    takes = [lengths[axis.rank] * length * rest for length in joined]
    received = axis.wire(x.dtype).all_to_all_v(packed, splits, takes)
    out = axis.empty(replace_length(replace_length(x.shape, divide, lengths[axis.rank]), join, sum(joined)), x.dtype)
    at, places = 0, uneven(joined)
    for peer, count in enumerate(takes):
        start, stop = places.slice_of(peer)
        room = out[(slice(None),) * join + (slice(start, stop),)]
        room[...] = received[at : at + count].reshape(room.shape)
        at += count
    return out, move.with_lengths(lengths, joined)


_RUN: dict[str, Callable[[ParallelAxis, Redistribute, Array], tuple[Array, Redistribute]]] = {
    "scatter": _scatter,
    "gather": _gather,
    "gather_partial": _gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
}


def _copy(axis: ParallelAxis, values: Array) -> Array:
    """Return a new contiguous array with these values."""
    out: Array = axis.empty(values.shape, values.dtype)
    out[...] = values
    return out
