"""Device operands: check the device arrays of named operations, and run operations through host copies.

Operations that need no host copies run in `between_devices`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from commlib.collectives.device.host_staging import deliver, fetch
from commlib.collectives.device.staging_queue import StagingQueue
from commlib.devices.array import DeviceArray
from commlib.devices.arrays import as_contiguous, as_writable
from commlib.devices.protocol import Device, DeviceEvent
from commlib.dtypes import Array
from commlib.errors import UsageError
from commlib.group.group import Group
from commlib.observe.recorder import Record


@dataclass(frozen=True, slots=True)
class _Flags:
    """The numpy array flags of a device array."""

    c_contiguous: bool = True
    writeable: bool = True
    carray: bool = True


@dataclass(slots=True, eq=False)
class DeviceOperand:
    """A device array in a named operation, with the numpy attributes that checks and comparisons need.

    user_array: the user's array. ready: the events to wait for, recorded when the operation was submitted.
    """

    array: DeviceArray
    user_array: Any
    ready: tuple[DeviceEvent, ...]
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

    def __getitem__(self, key: slice) -> DeviceOperand:
        """Return a range of rows."""
        return DeviceOperand(self.array[key], self.user_array, self.ready)


def wrap_operands(
    verb: str, name: str | None, inputs: Sequence[Any], outputs: Sequence[Any], device: str
) -> tuple[list[Any], list[Any], str]:
    """Return the arrays of an operation, device arrays as OnDevice, and the type of their device.

    Raises UsageError for an object that is not an array, and for arrays on several devices.
    """
    ours: dict[int, Any] = {}
    for take, arrays in ((as_writable, outputs), (as_contiguous, inputs)):
        for x in arrays:
            array = x if type(x) is np.ndarray else take(x, verb)
            ours.setdefault(
                id(x), DeviceOperand(array, x, record_ready(array)) if type(array) is DeviceArray else array
            )
    kinds = {array.array.device.name if type(array) is DeviceOperand else device for array in ours.values()}
    if len(kinds) > 1:
        where = ", ".join(sorted(kinds))
        raise UsageError(f"{verb} {name or ''}: the arrays are on {where}: pass arrays on one device")
    return [ours[id(x)] for x in inputs], [ours[id(x)] for x in outputs], next(iter(kinds), device)


def record_ready(array: DeviceArray) -> tuple[DeviceEvent, ...]:
    """Return the events that may produce an array's values: on the array's stream, and on the current one."""
    here, there = array.device.current(), array.stream
    return (here.record(),) if there is None or there == here else (here.record(), there.record())


@dataclass(frozen=True, slots=True)
class _HostCopies:
    """The attributes of a pending operation that `Execution` needs."""

    inputs: Sequence[Array]
    outputs: Sequence[Array]
    extra: Any
    record: Record | None


Done = Callable[[Any, Any, BaseException | None], None]


class Staging:
    """Copies the arrays of agreed operations to the host, and their results back. All copies are complete on return.

    The host waits for a device's work when an operation runs, not when it is submitted.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._queues: dict[Device, StagingQueue] = {}

    def queue(self, device: Device) -> StagingQueue:
        """Return the staging queue of the group for a device."""
        queue = self._queues.get(device)
        if queue is None:
            queue = self._queues[device] = StagingQueue(self._group.waits, device)
        return queue

    def close(self) -> None:
        """Wait, for a few seconds at most, until the devices have finished the queued work."""
        for queue in self._queues.values():
            queue.close()
        self._queues.clear()

    def bring(self, jobs: Sequence[Any], done: Done) -> tuple[list[Any], Done]:
        """Return jobs that use only host arrays, and a callback to use instead of `done`."""
        changed: dict[int, tuple[Any, dict[int, DeviceOperand]]] = {}
        ours = []
        for job in jobs:
            pending = job.pending
            if pending is None or not any(type(x) is DeviceOperand for x in (*pending.inputs, *pending.outputs)):
                ours.append(job)
                continue
            text = str(job.launch.request)
            read = {id(x) for x in pending.inputs}
            copies = {id(x): self._copy(x, id(x) in read, text) for x in (*pending.inputs, *pending.outputs)}
            inputs, outputs = ([copies[id(x)] for x in arrays] for arrays in (pending.inputs, pending.outputs))
            here = _HostCopies(inputs, outputs, pending.extra, pending.record)
            host_job = job._replace(pending=here)
            changed[id(host_job)] = job, {id(copies[id(x)]): x for x in pending.outputs}
            ours.append(host_job)

        def finish(job: Any, value: Any, error: BaseException | None) -> None:
            if (change := changed.get(id(job))) is None:
                done(job, value, error)
                return
            original, outputs = change
            if error is None:
                value = self._return_results(original, value, outputs)
            done(original, value, error)

        return ours, finish

    def _copy(self, x: DeviceOperand, is_read: bool, text: str) -> Array:
        if not is_read:
            return np.empty(x.shape, x.dtype)
        return np.array(fetch(self.queue(x.array.device), x.array, text))  # `fetch` reuses its buffer

    def _return_results(self, job: Any, value: Any, outputs: dict[int, DeviceOperand]) -> Any:
        """Return an operation's value with host arrays replaced by device arrays."""
        text, like = str(job.launch.request), job.pending.inputs[0].array
        if isinstance(value, tuple):  # received rows, and their counts by rank
            return self._make_result(value[0], like, text), *value[1:]
        results = []
        for array in value if value is not None else ():
            given = outputs.get(id(array))
            if given is None:
                results.append(self._make_result(array, like, text))
                continue
            self._deliver(given.array, array, text)
            results.append(given.user_array)
        return results

    def _make_result(self, value: Array, like: DeviceArray, text: str) -> Any:
        device = like.device
        with device.using(like.stream):  # the array's memory belongs to this stream, which orders its reuse
            result = device.empty(value.shape, value.dtype)
            target = device.wrap(result, text)
        self._deliver(target, value, text)
        return result

    def _deliver(self, target: DeviceArray, value: Array, text: str) -> None:
        if value.nbytes:
            deliver(self.queue(target.device), target.reshape(-1), value.reshape(-1), text, target.stream)
