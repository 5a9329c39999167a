"""reduce_scatter and reduce_scatter_v: every rank gets its part of the reduction of all ranks' arrays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from commlib.collectives.call import Call
from commlib.collectives.call_table import Calls, PreparedCall
from commlib.collectives.host.schedule_path import own_program
from commlib.collectives.operands import result, rows, source
from commlib.collectives.paths import Move, Verb
from commlib.collectives.verbs.all_reduce import choose_algorithm
from commlib.devices.arrays import address, device_of, name_of_device, overlap
from commlib.dtypes import Array, kernel_operation, name_of
from commlib.errors import UsageError
from commlib.execution.accumulation import Accumulation
from commlib.execution.streaming import Region
from commlib.group.arguments import integer
from commlib.group.group import Group
from commlib.kernels.fields.gate import OTHER_ARRAY
from commlib.node.collective import Exchange, ranges
from commlib.schedule.layout import Layout, cut, even, uneven


def reduce_scatter(calls: Calls, x: Any, op: str, out: Any, algorithm: str) -> PreparedCall:
    array = source(x, "reduce_scatter")
    rows(array, "reduce_scatter")
    call = Call("reduce_scatter", array.shape, array.dtype, op, algorithm=algorithm, device=name_of_device(array))
    return _ready(calls, call, array, out, x, (array.dtype, array.shape, op, algorithm))


def reduce_scatter_v(calls: Calls, x: Any, counts: Sequence[int], op: str, out: Any, algorithm: str) -> PreparedCall:
    verb, size = "reduce_scatter_v", calls.group.size
    array = source(x, verb)
    length, _ = rows(array, verb)
    shares = tuple(integer(verb, "a count", n) for n in counts)
    if len(shares) != size or min(shares) < 0 or sum(shares) != length:
        raise UsageError(
            f"{verb}: counts {list(shares)} must be {size} lengths, none negative, that add up to {length}, the length "
            "of dimension 0 of x"
        )
    call = Call(verb, array.shape, array.dtype, op, algorithm=algorithm, rows=shares, device=name_of_device(array))
    return _ready(calls, call, array, out, x, (array.dtype, array.shape, op, algorithm, shares))


def _ready(calls: Calls, call: Call, array: Array, out: Any, x: Any, key: tuple[Any, ...]) -> PreparedCall:
    rank, size = calls.group.rank, calls.group.size
    kernel_operation(name_of(array.dtype), call.op)
    start, stop = _layout(call, size).slice_of(rank)
    shape = (_rows(call, size)[rank], *array.shape[1:])
    target = result(out, shape, array.dtype, call.verb, device_of(array))
    flat = array.reshape(-1)
    if overlap(flat, target.flat) and address(target.flat) != address(flat[start:stop]):
        flat = flat.copy()  # the result would overwrite data that other ranks still read
    return PreparedCall.into(calls.find(_UNEVEN if call.rows else VERB, call, key, shape, OTHER_ARRAY), flat, target, x)


def _rows(call: Call, size: int) -> Sequence[int]:
    assert isinstance(call.size, tuple)
    return call.rows or even(call.size[0], size).counts


def _layout(call: Call, size: int) -> Layout:
    assert isinstance(call.size, tuple)
    row = math.prod(call.size[1:])
    return uneven(count * row for count in _rows(call, size))


def _exchange(call: Call, rank: int, size: int) -> Exchange:
    layout, item_bytes = _layout(call, size), call.dtype.itemsize
    start, stop = layout.slice_of(rank)
    return Exchange(
        ranges(layout, item_bytes),
        [(0, (stop - start) * item_bytes)] * size,
        max(layout.counts) * item_bytes,
        [start * item_bytes] * size,
        layout.count * item_bytes,
    )


def _messages(group: Group, call: Call) -> Move:
    name, segments = choose_algorithm(group, "reduce_scatter", call)
    steps = own_program(group, "reduce_scatter", name)
    layout = _layout(call, group.size)
    start, stop = layout.slice_of(group.rank)
    pieces = segments if steps.sends_single_chunks else 1

    def move(x: Array, target: Array) -> None:
        accumulation = Accumulation(x, call.op, group.size, once=name == "direct")
        work = accumulation.x if accumulation.widened else x.copy()  # the input must not change
        regions = [[Region(work, piece)] for piece in cut(layout, pieces)]
        group.programs.execute(steps, regions, call.text, accumulation.reduce_op)
        accumulation.finish(work[start:stop], target)

    return move


VERB = Verb(
    "reduce_scatter",
    _messages,
    exchange=_exchange,
    hierarchical=lambda call, size: _layout(call, size).counts,
)
_UNEVEN = Verb("reduce_scatter_v", _messages, exchange=_exchange)
