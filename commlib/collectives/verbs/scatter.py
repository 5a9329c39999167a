"""scatter: every rank gets its part of the root's array. Only the root knows the shape and dtype."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np

from commlib.buffers.views import address_of
from commlib.collectives.call_table import Calls, PreparedCall
from commlib.collectives.device.host_staging import deliver, fetch
from commlib.collectives.device.scatter import make_result_for, scatter_between_devices, scatter_by_messages
from commlib.collectives.host.message_call import MessageCall
from commlib.collectives.host.objects import broadcast_bytes
from commlib.collectives.host.schedule_path import own_program
from commlib.collectives.operands import Result, copy_if_shared, result, rows, source
from commlib.devices.array import DeviceArray
from commlib.devices.arrays import name_of_device
from commlib.devices.registry import streams
from commlib.dtypes import Array, numpy_dtype
from commlib.errors import UsageError
from commlib.execution.streaming import Region
from commlib.group.arguments import check_root
from commlib.group.group import Group
from commlib.node.collective import NOTHING, Exchange, NodeCollective, ranges
from commlib.schedule.layout import Layout, uneven

_NOTHING = np.empty(0, np.uint8)


def scatter(calls: Calls, x: Any, root: int, out: Any, algorithm: str) -> PreparedCall:
    group = calls.group
    root = check_root(group, "scatter", root)
    if algorithm == "node" and not group.shares_memory and group.size > 1:
        raise UsageError(
            f"scatter: algorithm 'node': {group.name} has no shared memory: its ranks are on several nodes, or "
            "COMMLIB_NODE_PATH=0"
        )
    on_node = group.shares_memory and algorithm in ("auto", "node")
    steps = own_program(group, "scatter", "binomial_tree" if algorithm in ("auto", "node") else algorithm, root=root)
    at_root = group.rank == root
    array = _check_source(x, group.size) if at_root else _NOTHING
    text = ", ".join(["scatter", f"root={root}", f"algorithm={algorithm}", *filter(None, [calls.label])])
    current = streams()  # of the caller's thread; `move` may run in another

    def move(array: Any, _: Any) -> tuple[Any, UsageError | None]:
        # The root sends shape and dtype, so the other ranks need not pass an array.
        meta = pickle.dumps((array.shape, array.dtype.name, name_of_device(array)) if at_root else None)
        (length, *row), dtype_name, device = pickle.loads(broadcast_bytes(group, meta, root, text))
        shape, dtype = (length // group.size, *row), numpy_dtype(dtype_name)
        given: Result | None = None
        refused = None
        try:
            make = make_result_for(device, current) if device else result
            given = make(out, shape, dtype, "scatter")
        except UsageError as error:  # the other ranks continue: participate, then raise
            refused = error
        whole, part = array if at_root else None, None if given is None else given.flat
        if (
            device
            and on_node
            and scatter_between_devices(calls, text, device, root, whole, part, (shape, dtype), current)
        ):
            return given, refused
        if device and algorithm != "node" and group.transport.accepts(device):
            scatter_by_messages(calls, steps, text, whole, part, (shape, dtype), current)
            return given, refused
        target = result(None, shape, dtype, "scatter") if given is None or device else given
        array = fetch(calls.context(array.device).queue, array, text) if type(array) is DeviceArray else array
        layout = uneven([target.flat.size] * group.size)
        if on_node:
            _on_node(group, text, array.reshape(-1) if at_root else None, target.flat, root)
        else:
            flat = array.reshape(-1) if at_root else np.empty(layout.count, dtype)
            group.programs.execute(steps, [[Region(flat, layout)]], text, part=2)
            start, stop = layout.slice_of(group.rank)
            target.flat[...] = flat[start:stop]
        if given is not None and given is not target:
            deliver(calls.context(given.array.device).queue, given.flat, target.flat, text, current[device])
        return given, refused

    return PreparedCall(MessageCall(group, text, move, flat=False), array, array, _deliver, x=x if at_root else None)


def _check_source(x: Any, size: int) -> Any:
    array = source(x, "scatter")
    length, _ = rows(array, "scatter")
    if length % size:
        raise UsageError(f"scatter: dimension 0 of x has length {length}, which {size} ranks cannot share evenly")
    return array


def _on_node(group: Group, text: str, flat: Array | None, target: Array, root: int) -> None:
    layout: Layout = uneven([target.size] * group.size)
    sends = ranges(layout, target.itemsize) if flat is not None else [NOTHING] * group.size
    takes = [(0, target.nbytes if rank == root else 0) for rank in range(group.size)]
    origin = target if flat is None else copy_if_shared(flat, target)
    exchange = Exchange(sends, takes, target.nbytes)
    NodeCollective.exchange(group.open(), text, exchange).run_at(address_of(origin), address_of(target))


def _deliver(answer: tuple[Any, UsageError | None]) -> Any:
    target, refused = answer
    if refused is not None:
        raise refused
    return target.deliver()
