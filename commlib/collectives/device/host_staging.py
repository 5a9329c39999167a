"""Host staging: copies of device arrays in host memory, within a call of their staging queue or of the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from commlib.collectives.device.call import InnerCall
from commlib.collectives.device.staging_queue import StagingQueue
from commlib.devices.array import DeviceArray
from commlib.dtypes import Array


@dataclass(frozen=True, slots=True)
class StagedResult:
    """Runs a host call that allocates its result, an array or a tuple of it and host values, on a device array.

    out: the array to copy the result of a tuple to; None: a new one.
    """

    queue: StagingQueue
    inner: InnerCall
    out: DeviceArray | None = None

    def perform(self, x: Any, target: Any) -> Any:
        source = copy_out(self.queue, x)
        value = self.inner.perform(source, source)
        if isinstance(value, tuple):
            return copy_back(self.queue, value[0], x.stream, self.out), *value[1:]
        return copy_back(self.queue, value, x.stream)


def copy_out(queue: StagingQueue, x: DeviceArray) -> Array:
    """Return a host copy of an array, in a staging buffer."""
    block: Array = queue.block(0, x.nbytes).view(x.dtype).reshape(x.shape)
    queue.device.copy(block, x)
    queue.wait(queue.device.current().record())
    return block


def copy_back(queue: StagingQueue, value: Array, stream: Any, out: DeviceArray | None = None) -> Any:
    """Queue a copy of a host array to a new array of the device, and return that.

    out: the array to copy to instead. A new array is allocated on the caller's `stream`, because the device may reuse
    its memory in that stream's order after it is freed.
    """
    block = queue.block(1, value.nbytes).view(value.dtype).reshape(value.shape)
    block[...] = value
    if out is not None:
        queue.device.current().wait(stream.record())
        queue.device.copy(out, block)
        return out
    with queue.device.using(stream):
        result = queue.device.empty(value.shape, value.dtype)
    queue.device.current().wait(stream.record())  # work on this memory's previous contents may still run
    queue.device.copy(queue.device.wrap(result, "result"), block)
    return result


def fetch(queue: StagingQueue, x: DeviceArray, text: str) -> Array:
    """Return a host copy of an array, within a host operation. It is valid until the next call."""
    value, _ = queue.run(text, lambda x, _: copy_out(queue, x), x, x.stream.record(), x)
    return value  # type: ignore[no-any-return]


def deliver(queue: StagingQueue, target: DeviceArray, value: Array, text: str, stream: Any) -> None:
    """Copy host values to a device array and wait for the copy, within a host operation.

    stream: its earlier work may still use the array, so the copy runs after it.
    """

    def run(x: Array, target: DeviceArray) -> None:
        block = queue.block(1, x.nbytes).view(x.dtype)
        block[...] = x
        queue.device.copy(target, block)
        queue.wait(queue.device.current().record())

    queue.run(text, run, value, stream.record(), target)
