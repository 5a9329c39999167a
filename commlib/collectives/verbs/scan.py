"""scan and exscan: rank r gets the reduction of the arrays of ranks 0..r, or of ranks 0..r-1."""

from __future__ import annotations

from typing import Any

import numpy as np

from commlib.buffers.views import address_of
from commlib.collectives.call import Call
from commlib.collectives.call_table import Calls, PreparedCall
from commlib.collectives.operands import copy_if_overlapping, result, source
from commlib.collectives.paths import Move, Verb
from commlib.devices.array import DeviceArray
from commlib.devices.arrays import device_of, empty_like, name_of_device
from commlib.dtypes import Array, kernel_operation, name_of
from commlib.errors import UsageError
from commlib.execution.accumulation import Accumulation
from commlib.execution.reduce_function import ReduceFunction
from commlib.execution.streaming import Region
from commlib.group.group import Group
from commlib.node import device_collective
from commlib.node.collective import NOTHING, Exchange, NodeCollective
from commlib.node.device_board import DeviceBoard
from commlib.schedule.layout import even
from commlib.schedule.scan import scan_program

# Each rank reads the arrays of all lower ranks. Larger arrays go by messages, within a node, too.
_LARGEST_ON_NODE = 1 << 20


def scan(calls: Calls, verb: str, x: Any, op: str, out: Any) -> PreparedCall:
    group = calls.group
    array = source(x, verb)
    if op == "mean":
        raise UsageError(
            f"{verb}: op='mean' is not supported, as each rank combines a different number of arrays: use op='sum' and "
            "divide the result"
        )
    kernel_operation(name_of(array.dtype), op)
    has_result = verb == "scan" or group.rank > 0
    target = result(out, array.shape, array.dtype, verb, device_of(array)) if has_result else None
    flat = array.reshape(-1) if target is None else copy_if_overlapping(array.reshape(-1), target.flat)
    call = Call(verb, array.size, array.dtype, op, algorithm="", device=name_of_device(array))
    return PreparedCall.into(calls.find(VERBS[verb], call, (array.dtype, array.shape, op)), flat, target, x)


def _messages(group: Group, call: Call) -> Move:
    steps, is_small = scan_program(call.verb, group.rank, group.size), call.nbytes <= _LARGEST_ON_NODE

    def move(x: Any, target: Any) -> None:
        if group.shares_memory and is_small and type(x) is not DeviceArray:
            _on_node(group, call, x, target)
            return
        accumulation = Accumulation(x, call.op, group.size)
        work = accumulation.x if accumulation.widened else x.copy()
        arrays = [work, empty_like(work, len(work))][: len(steps.regions)]
        regions = [Region(array, even(len(array), chunks)) for array, chunks in zip(arrays, steps.regions, strict=True)]
        group.programs.execute(steps, [regions], call.text, accumulation.reduce_op)
        if call.verb == "scan" or group.rank > 0:
            accumulation.finish(arrays[-1], target)

    return move


def _on_node(group: Group, call: Call, x: Array, target: Array) -> None:
    """Read the arrays of the lower ranks and combine them in rank order."""
    first, nbytes = group.rank + (call.verb == "scan"), call.nbytes
    inputs = np.empty((first, call.count), call.dtype)
    takes = [(rank * nbytes, nbytes) if rank < first else NOTHING for rank in range(group.size)]
    exchange = Exchange([(0, nbytes)], takes, nbytes)
    NodeCollective.exchange(group.open(), call.text, exchange).run_at(address_of(x), address_of(inputs))
    if first:
        ReduceFunction.of(call.dtype, call.op, 0).combine(list(inputs), target)


def _on_devices(board: DeviceBoard, open_slots: device_collective.OpenSlots, call: Call) -> device_collective.Enqueue:
    op = ReduceFunction.of(call.dtype, call.op, 0)
    return device_collective.scan(board, open_slots, call.count, op, inclusive=call.verb == "scan")


VERBS = {verb: Verb(verb, _messages, on_devices=_on_devices) for verb in ("scan", "exscan")}
