"""scatter on devices: the root describes its array within the call, and the other ranks make theirs from that."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from commlib.collectives.operands import Result, apart, result
from commlib.collectives.station import OnWait, Station
from commlib.devices.array import DeviceArray
from commlib.devices.arrays import device_named
from commlib.devices.protocol import Device
from commlib.devices.waiting import wait_for
from commlib.errors import UsageError
from commlib.execution.streaming import Region
from commlib.group.group import Group
from commlib.schedule.ir import Program
from commlib.schedule.layout import uneven


class Calls(Protocol):
    """The owner of a call: its group, and its station on each device."""

    group: Group

    def station(self, device: Device) -> Station: ...


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
