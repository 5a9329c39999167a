"""all_gather: every rank gets the arrays of all ranks, concatenated in rank order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from commlib.collectives.call import Call
from commlib.collectives.call_table import Calls, PreparedCall
from commlib.collectives.host.schedule_path import plan_program
from commlib.collectives.operands import result, source, stacked_shape
from commlib.collectives.paths import Move, Verb
from commlib.devices.arrays import address, device_of, name_of_device, overlap
from commlib.dtypes import Array
from commlib.execution.streaming import Region
from commlib.group.group import Group
from commlib.kernels.fields.gate import OTHER_ARRAY
from commlib.node.collective import Exchange, ranges
from commlib.schedule.layout import cut, uneven


def all_gather(calls: Calls, x: Any, out: Any, algorithm: str) -> PreparedCall:
    group = calls.group
    array = source(x, "all_gather")
    target = result(out, stacked_shape(group.size, array), array.dtype, "all_gather", device_of(array))
    flat, count = array.reshape(-1), array.size
    own = target.flat[group.rank * count : (group.rank + 1) * count]
    in_place = count > 0 and address(flat) == address(own)  # x is already this rank's part of out
    if not in_place and overlap(flat, target.flat):
        flat = flat.copy()  # the result would overwrite x before all ranks have read it
    call = Call("all_gather", array.shape, array.dtype, algorithm=algorithm, device=name_of_device(array))
    verb = _IN_PLACE if in_place else VERB
    key = (array.dtype, array.shape, algorithm, *["in place"] * in_place)  # only calls that are not can be gated
    return PreparedCall.into(calls.find(verb, call, key, target.array.shape, OTHER_ARRAY), flat, target, x)


def _exchange(call: Call, rank: int, size: int) -> Exchange:
    nbytes = call.nbytes
    takes = ranges(uneven([call.count] * size), call.dtype.itemsize)
    return Exchange([(0, nbytes)], takes, nbytes, [0] * size, nbytes)


def _exchange_in_place(call: Call, rank: int, size: int) -> Exchange:
    offsets = [call.nbytes * other for other in range(size)]
    return replace(_exchange(call, rank, size), offsets=offsets, nbytes=size * call.nbytes, in_target=True)


def _messages(group: Group, call: Call) -> Move:
    steps, pieces = plan_program(group, call, call.nbytes * group.size)
    layout = uneven([call.count] * group.size)
    layouts = cut(layout, pieces if steps.sends_single_chunks else 1)
    start, stop = layout.slice_of(group.rank)

    def move(x: Array, target: Array) -> None:
        target[start:stop] = x
        group.programs.execute(steps, [[Region(target, piece)] for piece in layouts], call.text)

    return move


VERB = Verb(
    "all_gather",
    _messages,
    exchange=_exchange,
    hierarchical=lambda call, size: (call.count,) * size,
)
_IN_PLACE = replace(VERB, exchange=_exchange_in_place)
