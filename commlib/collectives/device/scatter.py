"""scatter on devices: the root sends shape and dtype within the call, and the other ranks allocate their parts.

The data goes between the devices of a node, where the others copy from the root's, or by messages from device memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from commlib.collectives.context import PathContext
from commlib.collectives.operands import Result, copy_if_overlapping, result
from commlib.devices.array import DeviceArray
from commlib.devices.arrays import address, device_named, overlap
from commlib.devices.protocol import Device
from commlib.devices.waiting import wait_for
from commlib.errors import UsageError
from commlib.execution.streaming import Region
from commlib.group.group import Group
from commlib.node.collective import NOTHING, Exchange, ranges
from commlib.node.device_collective import exchange
from commlib.schedule.ir import Program
from commlib.schedule.layout import uneven


class ContextOwner(Protocol):
    """The owner of a call: its group, and the contexts of its devices."""

    group: Group

    def context(self, device: Device) -> PathContext: ...


def make_result_for(name: str, streams: Mapping[str, Any]) -> Callable[[Any, tuple[int, ...], Any, str], Result]:
    """Return a version of `operands.result` for a kind of device that allocates on the caller's stream.

    streams: the caller's. A device reuses memory in the order of the stream that allocated it. On any other stream it
    could reuse the result while the caller's stream still reads it. Raises UsageError.
    """
    device = device_named(name, "scatter")
    if name not in streams:
        raise UsageError(
            f"scatter: the root's array is on a device of kind {name!r}, but this rank had used none before the call: "
            "pass out=, an array on such a device"
        )

    def make(out: Any, shape: tuple[int, ...], dtype: Any, verb: str) -> Result:
        with device.using(streams[name]):
            return result(out, shape, dtype, verb, device)

    return make


def scatter_by_messages(
    calls: ContextOwner,
    steps: Program,
    text: str,
    array: DeviceArray | None,
    part: DeviceArray | None,
    shape_and_dtype: tuple[tuple[int, ...], Any],
    streams: Mapping[str, Any],
) -> None:
    """Scatter by messages from device memory, within a host operation; wait until the part has arrived.

    array: the root's, None elsewhere. part: the 1-D target of this rank's part; None if this rank refused the call,
    which the other ranks do not know. shape_and_dtype: the shape and dtype of a part.
    """
    group, (shape, dtype) = calls.group, shape_and_dtype
    layout = uneven([math.prod(shape)] * group.size)
    start, stop = layout.slice_of(group.rank)
    own = array if part is None else part
    if own is None:
        whole = np.empty(layout.count, dtype)
        group.programs.execute(steps, [[Region(whole, layout)]], text, part=2)
        return
    queue = calls.context(own.device).queue

    def run(x: DeviceArray | None, target: DeviceArray | None) -> None:
        whole = own.empty((layout.count,), dtype) if x is None else x.reshape(-1)
        group.programs.execute(steps, [[Region(whole, layout)]], text, part=2)
        if target is not None:
            target[:] = copy_if_overlapping(whole[start:stop], target)
            queue.wait(queue.device.current().record())

    queue.run(text, run, array, streams[own.device.name].record(), part)


def scatter_between_devices(
    calls: ContextOwner,
    text: str,
    name: str,
    root: int,
    array: DeviceArray | None,
    part: DeviceArray | None,
    shape_and_dtype: tuple[tuple[int, ...], Any],
    streams: Mapping[str, Any],
) -> bool:
    """Scatter between the devices of a node, within a host operation; wait until the part has arrived.

    Returns False on all ranks, without moving data, if a rank has no such device or the devices cannot exchange.
    For the arguments see `scatter_by_messages`.
    """
    group, (shape, dtype) = calls.group, shape_and_dtype
    device = _own_device(name, streams)
    able = device is not None and calls.context(device).peers.may_exchange
    if not group.open().board.barrier(1 + able, group.waits.watch(text)) or device is None or not able:
        return False
    context, watch = calls.context(device), group.waits.watch(text)
    peers = context.peers

    def run(x: DeviceArray | None, target: DeviceArray | None) -> bool:
        if peers.open(text) is None:
            return False
        into = device.wrap(device.empty(shape, dtype), "scatter").reshape(-1) if target is None else target
        layout = uneven([into.size] * group.size)
        parts = ranges(layout, into.itemsize)
        source = into if x is None else _copy_if_overlapping(x.reshape(-1), into, layout.offsets[root])
        sends = [NOTHING] * group.size if x is None else parts
        takes = [(0, into.nbytes) if rank == root else NOTHING for rank in range(group.size)]
        exchange(*peers.opened(), Exchange(sends, takes, into.nbytes), None, again=False)(source, into, watch)
        wait_for(device.current().record(), watch)
        return True

    moved, _ = context.queue.run(text, run, array, streams[name].record(), part)
    return bool(moved)


def _own_device(name: str, streams: Mapping[str, Any]) -> Device | None:
    """Return this rank's device of a kind, or None if it had not used one when it called."""
    try:
        device: Device = device_named(name, "scatter")
    except UsageError:
        return None
    return device if name in streams else None


def _copy_if_overlapping(x: DeviceArray, target: DeviceArray, offset: int) -> DeviceArray:
    """Return `x`, or a copy of it if the target overlaps it anywhere but exactly at `offset`."""
    own = address(x[offset : offset + target.size]) == address(target)
    return x if own or not overlap(x, target) else x.copy()
