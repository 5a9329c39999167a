"""Named operations on arrays of devices: what they are given, and how they go through copies in host memory.

Those that need not go there run `between_devices`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from commlib.collectives.device.staged import deliver, fetch
from commlib.collectives.device.staging_queue import Station
from commlib.devices.array import DeviceArray
from commlib.devices.arrays import readable, written
from commlib.devices.protocol import Device, Event
from commlib.dtypes import Array
from commlib.errors import UsageError
from commlib.group.group import Group
from commlib.observe.recorder import Record


@dataclass(frozen=True, slots=True)
class _Flags:
    """What numpy says of such an array."""

    c_contiguous: bool = True
    writeable: bool = True
    carray: bool = True


@dataclass(slots=True, eq=False)
class OnDevice:
    """An array of a device in a named operation: as much of numpy's as it takes to check and compare one.

    given: the user's array. ready: what it is behind, of the time when the operation was asked for.
    """

    array: DeviceArray
    given: Any
    ready: tuple[Event, ...]
    flags = _Flags()

    @property
    def dtype(self) -> Any:
        return self.array.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def ndim(self) -> int:
        return self.array.ndim

    @property
    def nbytes(self) -> int:
        return self.array.nbytes

    def __getitem__(self, key: slice) -> OnDevice:
        """Return rows that follow each other."""
        return OnDevice(self.array[key], self.given, self.ready)


def placed(
    verb: str, name: str | None, inputs: Sequence[Any], outputs: Sequence[Any], device: str
) -> tuple[list[Any], list[Any], str]:
    """Return the arrays of an operation, those of a device as OnDevice, and the kind of that device.

    Raises UsageError for what is no array, and for arrays of several devices.
    """
    ours: dict[int, Any] = {}
    for take, arrays in ((written, outputs), (readable, inputs)):
        for x in arrays:
            array = x if type(x) is np.ndarray else take(x, verb)
            ours.setdefault(id(x), OnDevice(array, x, ready_of(array)) if type(array) is DeviceArray else array)
    kinds = {array.array.device.name if type(array) is OnDevice else device for array in ours.values()}
    if len(kinds) > 1:
        where = ", ".join(sorted(kinds))
        raise UsageError(f"{verb} {name or ''}: the arrays are on {where}: pass arrays of one device")
    return [ours[id(x)] for x in inputs], [ours[id(x)] for x in outputs], next(iter(kinds), device)


def ready_of(array: DeviceArray) -> tuple[Event, ...]:
    """Return the events behind what an array may come to be by: on the stream that it names, and the current one."""
    here, there = array.device.current(), array.stream
    return (here.record(),) if there is None or there == here else (here.record(), there.record())


@dataclass(frozen=True, slots=True)
class _Copies:
    """What `Execution` needs of a pending operation."""

    inputs: Sequence[Array]
    outputs: Sequence[Array]
    extra: Any
    record: Record | None


Done = Callable[[Any, Any, BaseException | None], None]


class Staging:
    """Brings the arrays of agreed operations to the host, and their results back. Both have happened when it returns.

    A device's work is waited for when an operation's turn has come, not when it is asked for.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._stations: dict[Device, Station] = {}

    def station(self, device: Device) -> Station:
        """Return where the group's operations meet a device."""
        found = self._stations.get(device)
        if found is None:
            found = self._stations[device] = Station(self._group, device)
        return found

    def close(self) -> None:
        """Wait, for a few seconds, until the devices have done what was queued."""
        for station in self._stations.values():
            station.close()
        self._stations.clear()

    def bring(self, jobs: Sequence[Any], done: Done) -> tuple[list[Any], Done]:
        """Return jobs that work on the host alone, and what to tell of their ends instead of `done`."""
        changed: dict[int, tuple[Any, dict[int, OnDevice]]] = {}
        ours = []
        for job in jobs:
            pending = job.pending
            if pending is None or not any(type(x) is OnDevice for x in (*pending.inputs, *pending.outputs)):
                ours.append(job)
                continue
            text = str(job.launch.request)
            read = {id(x) for x in pending.inputs}
            copies = {id(x): self._copy(x, id(x) in read, text) for x in (*pending.inputs, *pending.outputs)}
            inputs, outputs = ([copies[id(x)] for x in arrays] for arrays in (pending.inputs, pending.outputs))
            here = _Copies(inputs, outputs, pending.extra, pending.record)
            made = job._replace(pending=here)
            changed[id(made)] = job, {id(copies[id(x)]): x for x in pending.outputs}
            ours.append(made)

        def finish(job: Any, value: Any, error: BaseException | None) -> None:
            if (found := changed.get(id(job))) is None:
                done(job, value, error)
                return
            original, outputs = found
            if error is None:
                value = self._returned(original, value, outputs)
            done(original, value, error)

        return ours, finish

    def _copy(self, x: OnDevice, is_read: bool, text: str) -> Array:
        if not is_read:
            return np.empty(x.shape, x.dtype)
        return np.array(fetch(self, x.array, text))  # what `fetch` returns is used again

    def _returned(self, job: Any, value: Any, outputs: dict[int, OnDevice]) -> Any:
        """Return an operation's value with arrays of the device for those of the host."""
        text, like = str(job.launch.request), job.pending.inputs[0].array
        if isinstance(value, tuple):  # rows that came, and from which ranks how many
            return self._new(value[0], like, text), *value[1:]
        results = []
        for array in value if value is not None else ():
            given = outputs.get(id(array))
            if given is None:
                results.append(self._new(array, like, text))
                continue
            self._deliver(given.array, array, text)
            results.append(given.given)
        return results

    def _new(self, value: Array, like: DeviceArray, text: str) -> Any:
        device = like.device
        with device.using(like.stream):  # whose memory it then is: it may be used again in the order of that
            made = device.empty(value.shape, value.dtype)
            target = device.wrap(made, text)
        self._deliver(target, value, text)
        return made

    def _deliver(self, target: DeviceArray, value: Array, text: str) -> None:
        if value.nbytes:
            deliver(self, target.reshape(-1), value.reshape(-1), text, target.stream)
