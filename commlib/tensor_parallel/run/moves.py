"""Moves on arrays: run a `commlib.tensor_parallel.Move` over an axis."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from commlib.devices.array import DeviceArray
from commlib.devices.copies import brought
from commlib.dtypes import Array
from commlib.p2p.lanes.staging import fetched
from commlib.schedule.layout import uneven
from commlib.sharding.axis import Axis
from commlib.tensor_parallel.moves import Move
from commlib.tensor_parallel.run.lengths import around, dimension, divided, exchanged, joined_lengths, with_length
from commlib.tensor_parallel.run.moves_on_device import run_on_device


def run(axis: Axis, move: Move, x: Any, *, may_write: bool = False) -> tuple[Any, Move]:
    """Return (the moved array, the move with the lengths of all shards: its conjugate needs them).

    Collective over the axis, but for "copy" and "scatter", which are this rank's own. The result is contiguous, and
    new unless nothing changes, or `may_write` to `x`. Raises UsageError for a dimension or lengths that do not fit.
    x: numpy's, or a DeviceArray: then the result is one, too, and on the current stream.
    """
    if type(x) is DeviceArray:
        if move.name in ("copy", "scatter") or axis.wire(x.dtype).is_plain:
            return run_on_device(axis, move, x, may_write=may_write)
        result, known = run(axis, move, fetched(axis.comm.group, x, move.name))  # codecs of moves are the host's
        return brought(result, x.device), known
    if move.name == "copy" or (axis.size == 1 and move.name != "all_to_all"):
        return _contiguous(x), move
    if move.name == "reduce":
        x = _contiguous(x)
        return axis.wire(x.dtype).all_reduce(x, out=x if may_write else axis.empty(x.shape, x.dtype)), move
    return _RUN[move.name](axis, move, x)


def _contiguous(x: Array) -> Array:
    return np.asarray(x, order="C")  # np.ascontiguousarray gives a number a dimension


def start(axis: Axis, move: Move, x: Array) -> Callable[[], Array]:
    """Begin "reduce" or "reduce_scatter", the moves that gradients take; return what waits for the result.

    What is encoded, or needs its dimensions in another order, is done here and now. `x`, numpy's, must not change
    meanwhile.
    """
    comm, is_plain = axis.comm, axis.wire(x.dtype).is_plain
    if move.name == "reduce" and is_plain:
        work = comm.all_reduce_async(_contiguous(x), out=axis.empty(x.shape, x.dtype))
        return work.wait
    if move.name == "reduce_scatter" and is_plain and around(x.shape, dim := dimension(move, move.dim, x))[0] == 1:
        lengths = divided(axis, move, x, dim)
        _, length, tail = around(x.shape, dim)
        shape, front = with_length(x.shape, dim, lengths[axis.rank]), np.ascontiguousarray(x).reshape(length, tail)
        out = axis.empty((lengths[axis.rank], tail), x.dtype)
        work = comm.reduce_scatter_v_async(front, lengths, out=out)
        return lambda: work.wait().reshape(shape)
    result, _ = run(axis, move, x)
    return lambda: result


def _scatter(axis: Axis, move: Move, x: Array) -> tuple[Array, Move]:
    dim = dimension(move, move.dim, x)
    lengths = divided(axis, move, x, dim)
    start, stop = uneven(lengths).slice_of(axis.rank)
    shard = x[(slice(None),) * dim + (slice(start, stop),)]
    return _filled(axis, shard), move.known(lengths)


def _gather(axis: Axis, move: Move, x: Array) -> tuple[Array, Move]:
    dim = dimension(move, move.dim, x)
    lengths = joined_lengths(axis, move, x, dim, move.lengths)
    lead, own, tail = around(x.shape, dim)
    shape = with_length(x.shape, dim, sum(lengths))
    if len(set(lengths)) > 1:
        front = np.ascontiguousarray(np.moveaxis(x, dim, 0))
        gathered = axis.wire(x.dtype).all_gather_v(front, lengths)
        whole = gathered if lead == 1 else _filled(axis, np.moveaxis(gathered, 0, dim))
    elif lead == 1:
        flat = np.ascontiguousarray(x).reshape(own, tail)
        whole = axis.wire(x.dtype).all_gather(flat, out=axis.empty((own * axis.size, tail), x.dtype))
    else:  # shards as they are, one behind another, then in their places
        gathered = axis.wire(x.dtype).all_gather(np.ascontiguousarray(x).reshape(1, -1))
        whole = _filled(axis, gathered.reshape(axis.size, lead, own, tail).transpose(1, 0, 2, 3))
    return whole.reshape(shape), move.known(lengths)


def _reduce_scatter(axis: Axis, move: Move, x: Array) -> tuple[Array, Move]:
    dim = dimension(move, move.dim, x)
    lengths = divided(axis, move, x, dim)
    lead, _, _ = around(x.shape, dim)
    front = np.ascontiguousarray(np.moveaxis(x, dim, 0))
    out = axis.empty((lengths[axis.rank], *front.shape[1:]), x.dtype)
    axis.wire(x.dtype).reduce_scatter_v(front, lengths, out=out)
    shard = out if lead == 1 else _filled(axis, np.moveaxis(out, 0, dim))
    return shard.reshape(with_length(x.shape, dim, lengths[axis.rank])), move.known(lengths)


def _all_to_all(axis: Axis, move: Move, x: Array) -> tuple[Array, Move]:
    divide, join, lengths, joined = exchanged(axis, move, x)
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
    came = axis.wire(x.dtype).all_to_all_v(packed, splits, takes)
    out = axis.empty(with_length(with_length(x.shape, divide, lengths[axis.rank]), join, sum(joined)), x.dtype)
    at, places = 0, uneven(joined)
    for peer, count in enumerate(takes):
        start, stop = places.slice_of(peer)
        room = out[(slice(None),) * join + (slice(start, stop),)]
        room[...] = came[at : at + count].reshape(room.shape)
        at += count
    return out, move.known(lengths, joined)


_RUN: dict[str, Callable[[Axis, Move, Array], tuple[Array, Move]]] = {
    "scatter": _scatter,
    "gather": _gather,
    "gather_partial": _gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
}


def _filled(axis: Axis, values: Array) -> Array:
    """Return a new contiguous array with these values."""
    out: Array = axis.empty(values.shape, values.dtype)
    out[...] = values
    return out
