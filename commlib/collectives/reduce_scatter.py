"""reduce_scatter: every rank gets its part of the combination of all ranks' arrays."""

from __future__ import annotations

from typing import Any

from commlib.collectives import hierarchical
from commlib.collectives.all_reduce import choose_algorithm
from commlib.collectives.call import Call
from commlib.collectives.operands import result, row_layout, rows, source
from commlib.collectives.paths import Move, Verb
from commlib.collectives.ready import Calls, Ready
from commlib.collectives.scheduled import own_program
from commlib.devices.arrays import address, device_of, name_of_device, overlap
from commlib.dtypes import Array, kernel_operation, name_of
from commlib.execution.accumulation import Accumulation
from commlib.execution.streaming import Region
from commlib.group.group import Group
from commlib.node.collective import Exchange, ranges
from commlib.schedule.layout import Layout, cut


def reduce_scatter(calls: Calls, x: Any, op: str, out: Any, algorithm: str) -> Ready:
    group = calls.group
    array = source(x, "reduce_scatter")
    rows(array, "reduce_scatter")
    kernel_operation(name_of(array.dtype), op)
    start, stop = row_layout(array.shape, group.size).slice_of(group.rank)
    own = _own_rows(array.shape[0], group)
    target = result(out, (own, *array.shape[1:]), array.dtype, "reduce_scatter", device_of(array))
    flat = array.reshape(-1)
    if overlap(flat, target.flat) and address(target.flat) != address(flat[start:stop]):
        flat = flat.copy()  # where others still read
    call = Call("reduce_scatter", array.shape, array.dtype, op, algorithm=algorithm, device=name_of_device(array))
    key = (array.dtype, array.shape, op, algorithm)
    return Ready.into(calls.find(VERB, call, key, target.array.shape), flat, target, x)


def _own_rows(length: int, group: Group) -> int:
    return length // group.size + (group.rank < length % group.size)


def _layout(call: Call, size: int) -> Layout:
    assert isinstance(call.size, tuple)
    return row_layout(call.size, size)


def _exchange(call: Call, rank: int, size: int) -> Exchange:
    return reduce_parts(_layout(call, size), call.dtype.itemsize, rank)


def reduce_parts(layout: Layout, item_bytes: int, rank: int) -> Exchange:
    """Return the exchange in which each rank combines its chunk of a layout."""
    size, (start, stop) = len(layout.counts), layout.slice_of(rank)
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
        work = accumulation.x if accumulation.widened else x.copy()  # the input stays as it is
        regions = [[Region(work, piece)] for piece in cut(layout, pieces)]
        group.execute(steps, regions, call.text, accumulation.reduce_op)
        accumulation.finish(work[start:stop], target)

    return move


VERB = Verb("reduce_scatter", _messages, exchange=_exchange, hierarchical=hierarchical.reduce_scatter)
