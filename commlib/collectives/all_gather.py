"""all_gather and all_gather_v: every rank gets the arrays of all ranks, one after another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from commlib.buffers.views import address_of
from commlib.collectives import all_gather_on_rails, hierarchical
from commlib.collectives.by_messages import MessageCall
from commlib.collectives.call import Call
from commlib.collectives.operands import made_like, result, rows, source, stacked
from commlib.collectives.paths import Move, Verb
from commlib.collectives.ready import Calls, Ready
from commlib.collectives.scheduled import own_program, planned
from commlib.devices.array import DeviceArray
from commlib.devices.arrays import address, device_of, name_of_device, overlap
from commlib.dtypes import Array
from commlib.execution.streaming import Region
from commlib.group.group import Group
from commlib.node.collective import Exchange, NodeCollective, ranges
from commlib.schedule.layout import cut, uneven


def all_gather(calls: Calls, x: Any, out: Any, algorithm: str) -> Ready:
    group = calls.group
    array = source(x, "all_gather")
    target = result(out, stacked(group.size, array), array.dtype, "all_gather", device_of(array))
    flat, count = array.reshape(-1), array.size
    own = target.flat[group.rank * count : (group.rank + 1) * count]
    in_place = count > 0 and address(flat) == address(own)  # each rank's lies in its own part
    if not in_place and overlap(flat, target.flat):
        flat = flat.copy()  # it would be overwritten before all have read it
    call = Call("all_gather", array.shape, array.dtype, algorithm=algorithm, device=name_of_device(array))
    verb = _IN_PLACE if in_place else VERB
    key = (array.dtype, array.shape, algorithm, *["in place"] * in_place)
    return Ready.into(calls.find(verb, call, key, target.array.shape), flat, target, x)


def _exchange(call: Call, rank: int, size: int) -> Exchange:
    nbytes = call.nbytes
    takes = ranges(uneven([call.count] * size), call.dtype.itemsize)
    return Exchange([(0, nbytes)], takes, nbytes, [0] * size, nbytes)


def _exchange_in_place(call: Call, rank: int, size: int) -> Exchange:
    offsets = [call.nbytes * other for other in range(size)]
    return replace(_exchange(call, rank, size), offsets=offsets, nbytes=size * call.nbytes, in_target=True)


def _messages(group: Group, call: Call) -> Move:
    steps, pieces = planned(group, call, call.nbytes * group.size)
    layout = uneven([call.count] * group.size)
    layouts = cut(layout, pieces if steps.sends_single_chunks else 1)
    start, stop = layout.slice_of(group.rank)

    def move(x: Array, target: Array) -> None:
        target[start:stop] = x
        group.execute(steps, [[Region(target, piece)] for piece in layouts], call.text)

    return move


VERB = Verb(
    "all_gather",
    _messages,
    exchange=_exchange,
    hierarchical=hierarchical.all_gather,
    hierarchical_on_devices=all_gather_on_rails.all_gather,
)
_IN_PLACE = replace(VERB, exchange=_exchange_in_place)


def all_gather_v(calls: Calls, x: Any) -> Ready:
    group = calls.group
    array = source(x, "all_gather_v")
    _, row = rows(array, "all_gather_v")
    # The length of dimension 0 may differ.
    text = Call("all_gather_v", array[:0].shape, array.dtype, algorithm="", device=name_of_device(array)).text

    def move(x: Any, _: Any) -> Any:
        lengths = gather_counts(group, text, np.array([len(x)], np.int64))
        gathered, given = made_like(x, (int(lengths.sum()), *x.shape[1:]))
        gather_parts(group, text, x, gathered, [int(n) * row for n in lengths])
        return given

    return calls.whole(MessageCall(group, text, move, flat=False), array, x)


def gather_parts(group: Group, text: str, x: Any, whole: Any, counts: Sequence[int]) -> None:
    """Gather contiguous arrays of `counts[r]` elements of each rank r, within an operation."""
    layout, flat = uneven(counts), whole.reshape(-1)
    if group.shares_memory and type(whole) is not DeviceArray:
        exchange = Exchange([(0, x.nbytes)], ranges(layout, x.itemsize), max(layout.counts) * x.itemsize)
        NodeCollective.exchange(group.open(), text, exchange).run_at(address_of(x), address_of(flat))
        return
    start, stop = layout.slice_of(group.rank)
    flat[start:stop] = x.reshape(-1)
    group.execute(own_program(group, "all_gather", "ring"), [[Region(flat, layout)]], text, part=1)


def gather_counts(group: Group, text: str, counts: Array) -> Array:
    """Return int64 counts of all ranks, as many from each, one after another; within an operation."""
    whole = np.empty(group.size * len(counts), np.int64)
    layout = uneven([len(counts)] * group.size)
    if group.shares_memory:
        exchange = Exchange([(0, counts.nbytes)], ranges(layout, 8), counts.nbytes)
        NodeCollective.exchange(group.open(), text, exchange).run_at(address_of(counts), address_of(whole))
        return whole
    start, stop = layout.slice_of(group.rank)
    whole[start:stop] = counts
    group.execute(own_program(group, "all_gather", "bruck"), [[Region(whole, layout)]], text)
    return whole
