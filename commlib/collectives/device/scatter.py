"""scatter on devices: the root describes its array within the call, and the other ranks make theirs from that.

Between the devices of a node the others copy from the root's; or it goes by messages of the device's memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from commlib.collectives.device.node import Peers
from commlib.collectives.device.staging_queue import OnWait, Station
from commlib.collectives.operands import Result, apart, result
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


class Calls(Protocol):
    """The owner of a call: its group, its station on each device, and where its ranks meet there."""

    group: Group

    def station(self, device: Device) -> Station: ...

    def peers(self, device: Device) -> Peers: ...


def made_for(name: str, streams: Mapping[str, Any]) -> Callable[[Any, tuple[int, ...], Any, str], Result]:
    """Return what does `operands.result` for a kind of device, in memory of the caller's stream.

    streams: those of the caller. A device uses memory again in the order of the stream that it was made on: on another
    one it would be used again while the caller's stream still reads it. Raises UsageError.
    """
    device = device_named(name, "scatter")
    if name not in streams:
        raise UsageError(
            f"scatter: the array is on a device of the kind {name!r}, which this rank had not when it called scatter: "
            "pass out, an array there"
        )

    def make(out: Any, shape: tuple[int, ...], dtype: Any, verb: str) -> Result:
        with device.using(streams[name]):
            return result(out, shape, dtype, verb, device)

    return make


def move_directly(
    calls: Calls,
    steps: Program,
    text: str,
    array: DeviceArray | None,
    part: DeviceArray | None,
    made: tuple[tuple[int, ...], Any],
    streams: Mapping[str, Any],
) -> None:
    """Scatter by messages of the device's memory, within an operation of the host's; wait until the part is there.

    array: the root's, None elsewhere. part: where this rank's part goes, 1-D; None if the call was refused here, which
    the other ranks do not know. made: the shape and dtype of a part.
    """
    group, (shape, dtype) = calls.group, made
    layout = uneven([math.prod(shape)] * group.size)
    start, stop = layout.slice_of(group.rank)
    own = array if part is None else part
    if own is None:
        whole = np.empty(layout.count, dtype)
        group.execute(steps, [[Region(whole, layout)]], text, part=2)
        return
    station = calls.station(own.device)

    def run(x: DeviceArray | None, target: DeviceArray | None, on_wait: OnWait) -> None:
        whole = own.empty((layout.count,), dtype) if x is None else x.reshape(-1)
        group.execute(steps, [[Region(whole, layout)]], text, part=2)
        if target is not None:
            target[:] = apart(whole[start:stop], target)
            wait_for(station.device.current().record(), on_wait)

    station.run(text, run, array, streams[own.device.name].record(), part)


def move_between(
    calls: Calls,
    text: str,
    name: str,
    root: int,
    array: DeviceArray | None,
    part: DeviceArray | None,
    made: tuple[tuple[int, ...], Any],
    streams: Mapping[str, Any],
) -> bool:
    """Scatter between the devices of a node, within an operation of the host's, and wait until the part is there.

    Returns False on all ranks, and nothing has moved, where those cannot: where a rank has no device of this name, too.
    See `move_directly`.
    """
    group, (shape, dtype) = calls.group, made
    device = _here(name, streams)
    able = device is not None and calls.peers(device).may_exchange
    if not group.open().board.meet(1 + able, group.watch(text)) or device is None or not able:
        return False
    peers, station, watch = calls.peers(device), calls.station(device), group.watch(text)

    def run(x: DeviceArray | None, target: DeviceArray | None, on_wait: OnWait) -> bool:
        if peers.open(text, on_wait) is None:
            return False
        into = device.wrap(device.empty(shape, dtype), "scatter").reshape(-1) if target is None else target
        layout = uneven([into.size] * group.size)
        parts = ranges(layout, into.itemsize)
        source = into if x is None else _apart(x.reshape(-1), into, layout.offsets[root])
        sends = [NOTHING] * group.size if x is None else parts
        takes = [(0, into.nbytes) if rank == root else NOTHING for rank in range(group.size)]
        exchange(*peers.opened(), Exchange(sends, takes, into.nbytes), None, again=False)(source, into, watch)
        wait_for(device.current().record(), watch)
        return True

    moved, _ = station.run(text, run, array, streams[name].record(), part)
    return bool(moved)


def _here(name: str, streams: Mapping[str, Any]) -> Device | None:
    """Return this rank's device of a kind, if it had one when it called."""
    try:
        device: Device = device_named(name, "scatter")
    except UsageError:
        return None
    return device if name in streams else None


def _apart(x: DeviceArray, target: DeviceArray, offset: int) -> DeviceArray:
    """Return `x`, or a copy of it if another part of it than that at `offset` would be overwritten."""
    own = address(x[offset : offset + target.size]) == address(target)
    return x if own or not overlap(x, target) else x.copy()
