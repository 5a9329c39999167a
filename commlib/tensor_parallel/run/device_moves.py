"""Redistribution of device arrays: `moves.run` with a kernel for reordering dimensions, on the current stream.

Arrays with a codec do not use this path.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from commlib.devices.array import DeviceArray
from commlib.kernels.protocol import BlockLayout
from commlib.schedule.layout import uneven
from commlib.sharding.axis import ParallelAxis
from commlib.tensor_parallel.moves import Redistribute
from commlib.tensor_parallel.run.lengths import (
    count_around,
    dimension,
    exchange_lengths,
    joined_lengths,
    replace_length,
    split_lengths,
)


def run_on_device(
    axis: ParallelAxis, move: Redistribute, x: DeviceArray, *, may_write: bool
) -> tuple[DeviceArray, Redistribute]:
    """Run a move on a device array: see `moves.run`."""
    if move.name == "copy" or (axis.size == 1 and move.name != "all_to_all"):
        return x, move
    if move.name == "reduce":
        out = x if may_write else x.empty(x.shape, x.dtype)
        axis.comm.all_reduce(x, out=out)
        return out, move
    return _RUN[move.name](axis, move, x)


def _scatter(axis: ParallelAxis, move: Redistribute, x: DeviceArray) -> tuple[DeviceArray, Redistribute]:
    dim = dimension(move, move.dim, x)
    lengths = split_lengths(axis, move, x, dim)
    start, stop = uneven(lengths).slice_of(axis.rank)
    shard = x.empty(replace_length(x.shape, dim, stop - start), x.dtype)
    _cut(x, dim, start, shard)
    return shard, move.with_lengths(lengths)


def _gather(axis: ParallelAxis, move: Redistribute, x: DeviceArray) -> tuple[DeviceArray, Redistribute]:
    dim = dimension(move, move.dim, x)
    lengths = joined_lengths(axis, move, x, dim, move.lengths)
    lead, own, tail = count_around(x.shape, dim)
    shape = replace_length(x.shape, dim, sum(lengths))
    front = _swap(x, lead, own, tail).reshape(own, lead * tail)
    if len(set(lengths)) > 1:
        gathered = x.device.wrap(_plain(axis, x).all_gather_v(front, lengths), "gather")
    else:
        gathered = x.empty((sum(lengths), lead * tail), x.dtype)
        _plain(axis, x).all_gather(front, out=gathered)
    return _swap(gathered, sum(lengths), lead, tail).reshape(shape), move.with_lengths(lengths)


def _reduce_scatter(axis: ParallelAxis, move: Redistribute, x: DeviceArray) -> tuple[DeviceArray, Redistribute]:
    dim = dimension(move, move.dim, x)
    lengths = split_lengths(axis, move, x, dim)
    lead, length, tail = count_around(x.shape, dim)
    own = lengths[axis.rank]
    front, out = _swap(x, lead, length, tail).reshape(length, lead * tail), x.empty((own, lead * tail), x.dtype)
    _plain(axis, x).reduce_scatter_v(front, lengths, out=out)
    return _swap(out, own, lead, tail).reshape(replace_length(x.shape, dim, own)), move.with_lengths(lengths)


def _all_to_all(axis: ParallelAxis, move: Redistribute, x: DeviceArray) -> tuple[DeviceArray, Redistribute]:
    divide, join, lengths, joined = exchange_lengths(axis, move, x)
    own, of_each = lengths[axis.rank], [replace_length(x.shape, divide, length) for length in lengths]
    packed = x.empty((x.size,), x.dtype)
    for part, shape, start in zip(_parts(packed, of_each), of_each, _starts(lengths), strict=True):
        _cut(x, divide, start, part.reshape(shape))
    arriving = [replace_length(replace_length(x.shape, divide, own), join, length) for length in joined]
    takes = [math.prod(shape) for shape in arriving]
    received = x.device.wrap(_plain(axis, x).all_to_all_v(packed, [math.prod(s) for s in of_each], takes), "all_to_all")
    out = x.empty(replace_length(replace_length(x.shape, divide, own), join, sum(joined)), x.dtype)
    for part, shape, start in zip(_parts(received, arriving), arriving, _starts(joined), strict=True):
        _put(part.reshape(shape), out, join, start)
    return out, move.with_lengths(lengths, joined)


_RUN = {
    "scatter": _scatter,
    "gather": _gather,
    "gather_partial": _gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
}


def _plain(axis: ParallelAxis, x: DeviceArray) -> Any:
    """Return the verbs without a codec, which take device arrays, too."""
    return axis.wire(x.dtype)


# Dimensions


def _swap(x: DeviceArray, rows: int, columns: int, run: int) -> DeviceArray:
    """Return an array of the shape (rows, columns, run) as (columns, rows, run), 1-D; itself if that is the same."""
    flat = x.reshape(-1)
    if rows == 1 or columns == 1:
        return flat
    out = x.empty((flat.size,), x.dtype)
    _copy(flat, out, BlockLayout(columns, rows, run, run, columns * run, rows * run, run))
    return out


def _cut(x: DeviceArray, dim: int, start: int, part: DeviceArray) -> None:
    """Queue a copy to `part` of the elements of x from `start` on along a dimension."""
    (rows, length, tail), run = count_around(x.shape, dim), math.prod(part.shape[dim:])
    _copy(x.reshape(-1)[start * tail :], part.reshape(-1), BlockLayout(rows, 1, run, length * tail, 0, run, 0))


def _put(part: DeviceArray, x: DeviceArray, dim: int, start: int) -> None:
    """Queue a copy from `part` to the elements of x from `start` on along a dimension."""
    (rows, length, tail), run = count_around(x.shape, dim), math.prod(part.shape[dim:])
    _copy(part.reshape(-1), x.reshape(-1)[start * tail :], BlockLayout(rows, 1, run, run, 0, length * tail, 0))


def _copy(source: DeviceArray, target: DeviceArray, blocks: BlockLayout) -> None:
    if blocks.rows * blocks.columns * blocks.run:
        source.device.kernels.copy_blocks(source, target, blocks)


def _parts(x: DeviceArray, shapes: Sequence[tuple[int, ...]]) -> list[DeviceArray]:
    """Return a 1-D array split into consecutive 1-D arrays of the sizes of these shapes."""
    sizes = [math.prod(shape) for shape in shapes]
    return [x[start : start + size] for start, size in zip(_starts(sizes), sizes, strict=True)]


def _starts(lengths: Sequence[int]) -> list[int]:
    return list(accumulate(lengths, initial=0))[:-1]
