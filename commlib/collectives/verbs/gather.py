"""gather: one rank gets the arrays of all ranks, concatenated in rank order."""

from __future__ import annotations

from typing import Any

from commlib.collectives.call import Call
from commlib.collectives.call_table import Calls, PreparedCall
from commlib.collectives.host.schedule_path import own_program
from commlib.collectives.operands import copy_if_shared, result, source, stacked_shape
from commlib.collectives.paths import Move, Verb
from commlib.devices.arrays import device_of, empty_like, name_of_device
from commlib.dtypes import Array
from commlib.execution.streaming import Region
from commlib.group.arguments import check_root
from commlib.group.group import Group
from commlib.node.collective import NOTHING, Exchange, ranges
from commlib.schedule.layout import uneven


def gather(calls: Calls, x: Any, root: int, out: Any, algorithm: str) -> PreparedCall:
    group = calls.group
    array = source(x, "gather")
    root = check_root(group, "gather", root)
    shape = stacked_shape(group.size, array)
    target = result(out, shape, array.dtype, "gather", device_of(array)) if group.rank == root else None
    flat = array.reshape(-1) if target is None else copy_if_shared(array.reshape(-1), target.flat)
    call = Call("gather", array.shape, array.dtype, root=root, algorithm=algorithm, device=name_of_device(array))
    compiled = calls.find(VERB, call, (array.dtype, array.shape, root, algorithm), shape)
    return PreparedCall.into(compiled, flat, target, x)


def _exchange(call: Call, rank: int, size: int) -> Exchange:
    nbytes = call.nbytes
    takes = ranges(uneven([call.count] * size), call.dtype.itemsize) if rank == call.root else [NOTHING] * size
    return Exchange([(0, nbytes)], takes, nbytes, [0] * size, nbytes)


def _messages(group: Group, call: Call) -> Move:
    algorithm = "binomial_tree" if call.algorithm == "auto" else call.algorithm
    steps = own_program(group, "gather", algorithm, root=call.root)
    layout = uneven([call.count] * group.size)
    start, stop = layout.slice_of(group.rank)

    def move(x: Array, target: Array) -> None:
        whole = target if group.rank == call.root else empty_like(x, layout.count)
        whole[start:stop] = x
        group.programs.execute(steps, [[Region(whole, layout)]], call.text)

    return move


VERB = Verb("gather", _messages, exchange=_exchange)
