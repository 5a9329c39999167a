"""reduce: one rank gets the reduction of all ranks' arrays."""

from __future__ import annotations

from typing import Any

from commlib.collectives.call import Call
from commlib.collectives.call_table import Calls, PreparedCall
from commlib.collectives.host.schedule_path import plan_program
from commlib.collectives.operands import copy_if_overlapping, result, source
from commlib.collectives.paths import Move, Verb
from commlib.devices.arrays import device_of, name_of_device
from commlib.dtypes import Array, kernel_operation, name_of
from commlib.execution.accumulation import Accumulation
from commlib.execution.streaming import Region
from commlib.group.arguments import check_root
from commlib.group.group import Group
from commlib.node.collective import Exchange
from commlib.schedule.layout import blocks


def reduce(calls: Calls, x: Any, op: str, root: int, out: Any, algorithm: str) -> PreparedCall:
    group = calls.group
    array = source(x, "reduce")
    root = check_root(group, "reduce", root)
    kernel_operation(name_of(array.dtype), op)
    target = result(out, array.shape, array.dtype, "reduce", device_of(array)) if group.rank == root else None
    flat = array.reshape(-1) if target is None else copy_if_overlapping(array.reshape(-1), target.flat)
    call = Call("reduce", array.size, array.dtype, op, root, algorithm, device=name_of_device(array))
    compiled = calls.find(VERB, call, (array.dtype, array.shape, op, root, algorithm), array.shape)
    return PreparedCall.into(compiled, flat, target, x)


def _exchange(call: Call, rank: int, size: int) -> Exchange:
    nbytes = call.nbytes
    takes = [(0, nbytes if rank == call.root else 0)] * size
    return Exchange([(0, nbytes)], takes, nbytes, [0] * size, nbytes)


def _messages(group: Group, call: Call) -> Move:
    steps, pieces = plan_program(group, call, call.nbytes)

    def move(x: Array, target: Array) -> None:
        accumulation = Accumulation(x, call.op, group.size)
        work = accumulation.x if accumulation.widened else x.copy()
        layouts = blocks(len(work), steps.regions[0], pieces)
        group.programs.execute(steps, [[Region(work, layout)] for layout in layouts], call.text, accumulation.reduce_op)
        if group.rank == call.root:
            accumulation.finish(work, target)

    return move


VERB = Verb("reduce", _messages, exchange=_exchange, elementwise=True)
