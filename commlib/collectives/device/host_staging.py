"""Staged path: copy device arrays to host memory, run the call on a host path, and copy the result back.

It supports every call. Large arrays go in pieces: while the host works on one piece, the device copies the next piece
out and the previous piece back.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

from commlib.collectives.call import Call
from commlib.collectives.device.call import DeviceCall
from commlib.collectives.device.staging_queue import OnWait, Run, StagingQueue
from commlib.collectives.paths import Path, Verb, compile_call
from commlib.devices.array import DeviceArray
from commlib.devices.protocol import Device
from commlib.devices.waiting import wait_for
from commlib.dtypes import Array
from commlib.group.group import Group
from commlib.runtime.compiled_call import CompiledCall


class StagingQueues(Protocol):
    """The owner of a group's staging queues."""

    def station(self, device: Device) -> StagingQueue: ...


class StagedPath:
    """The device path through host memory. It is always available and supports every call."""

    name, refusal, is_open, only_queues = "host", "", True, False

    def __init__(self, paths: tuple[Path, ...], group: Group, station: StagingQueue) -> None:
        self._paths, self._group, self._station = paths, group, station

    def takes(self, verb: Verb, call: Call) -> bool:
        return True

    def open(self, text: str, on_wait: OnWait) -> bool:
        return True

    def run(self, verb: Verb, call: Call) -> Run:
        paths, group, station = self._paths, self._group, self._station
        if call.algorithm == self.name:
            call = replace(call, algorithm="auto")
        if verb.elementwise:
            count = max(1, group.config.staging_kib * 1024 // call.dtype.itemsize)
            parts = cut(call, count)
            compiled = {part: compile_call(paths, group, verb, part) for _, _, part in reversed(parts)}
            return run_in_pieces(
                station, [(start, stop, compiled[part]) for start, stop, part in parts], group.rank, verb, call
            )
        return run_through_host(station, compile_call(paths, group, verb, call), group.rank, verb, call)


def make_device_call(
    group: Group, station: StagingQueue, compiled: CompiledCall, out: DeviceArray | None = None
) -> DeviceCall:
    """Return a DeviceCall for a compiled call that allocates its result: an array, or a tuple of it and host values.

    out: the array to copy the result to.
    """
    if group.transport.accepts(station.device.name):
        return DeviceCall(group.progress, compiled.text, station, lambda x, *_: compiled.perform(x, x))

    def run(x: DeviceArray, target: DeviceArray, on_wait: OnWait) -> Any:
        source = copy_out(station, x, on_wait)
        value = compiled.perform(source, source)
        if isinstance(value, tuple):
            return copy_back(station, value[0], x.stream, on_wait, out), *value[1:]
        return copy_back(station, value, x.stream, on_wait)

    return DeviceCall(group.progress, compiled.text, station, run)


def run_through_host(station: StagingQueue, whole: CompiledCall, rank: int, verb: Verb, call: Call) -> Run:
    """Return a Run that copies the source to the host, runs the call on the host and copies the result back."""
    reads, writes = reads_and_writes(verb, call, rank)

    def run(x: DeviceArray, target: DeviceArray, on_wait: OnWait) -> None:
        source = station.block(0, x.nbytes, on_wait).view(x.dtype)
        result = station.block(1, target.nbytes, on_wait).view(target.dtype) if writes else source
        if reads:
            station.device.copy(source, x)
            wait_for(station.device.current().record(), on_wait)
        whole.perform(source, result)
        if writes:
            station.device.copy(target, result)

    return run


def run_in_pieces(
    station: StagingQueue, pieces: list[tuple[int, int, CompiledCall]], rank: int, verb: Verb, call: Call
) -> Run:
    """Return a Run that does the same piece by piece, in place, with three staging buffers in rotation.

    pieces: each (start, stop, compiled call). The device copies one piece out on the queue's stream and another back on
    a second stream, both while the host works on the piece in between: devices copy in both directions at once.
    """
    reads, writes = reads_and_writes(verb, call, rank)
    longest = max((stop - start for start, stop, _ in pieces), default=0) * call.dtype.itemsize

    def run(x: DeviceArray, target: DeviceArray, on_wait: OnWait) -> None:
        device, out, back = station.device, station.device.current(), station.copy_stream
        blocks = [station.block(number, longest, on_wait).view(call.dtype) for number in range(3)]
        free: list[Any] = [None] * 3  # the events after each block's copy back
        back.wait(out.record())

        def fetch(number: int) -> tuple[Array, Any]:
            start, stop, _ = pieces[number]
            block = blocks[number % 3][: stop - start]
            if free[number % 3] is not None:
                out.wait(free[number % 3])
            if reads:
                device.copy(block, x[start:stop])
            return block, out.record()

        in_flight = [fetch(0)] if pieces else []
        for number, (start, stop, compiled) in enumerate(pieces):
            block, event = in_flight.pop()
            if number + 1 < len(pieces):
                in_flight.append(fetch(number + 1))
            wait_for(event, on_wait)
            compiled.perform(block, block)
            if writes:
                with device.using(back):
                    device.copy(target[start:stop], block)
                free[number % 3] = back.record()
        out.wait(back.record())

    return run


def reads_and_writes(verb: Verb, call: Call, rank: int) -> tuple[bool, bool]:
    """Return whether the call reads this rank's array, and whether this rank gets a result."""
    if verb.name == "broadcast":
        return rank == call.root, rank != call.root
    return True, call.root in (-1, rank) and (verb.name != "exscan" or rank > 0)


def cut(call: Call, count: int) -> list[tuple[int, int, Call]]:
    """Cut a call into calls on at most `count` elements; return (start, stop, call) for each."""
    if call.count <= count:
        return [(0, call.count, call)]
    starts = range(0, call.count, count)
    return [
        (start, stop, replace(call, size=stop - start, whole=call.count))
        for start in starts
        for stop in [min(start + count, call.count)]
    ]


def copy_out(station: StagingQueue, x: DeviceArray, on_wait: OnWait) -> Array:
    """Return a host copy of an array, in a staging buffer."""
    block: Array = station.block(0, x.nbytes, on_wait).view(x.dtype).reshape(x.shape)
    station.device.copy(block, x)
    wait_for(station.device.current().record(), on_wait)
    return block


def copy_back(station: StagingQueue, value: Array, stream: Any, on_wait: OnWait, out: DeviceArray | None = None) -> Any:
    """Queue a copy of a host array to a new array of the device, and return that.

    out: the array to copy to instead. A new array is allocated on the caller's `stream`, because the device may reuse
    its memory in that stream's order after it is freed.
    """
    block = station.block(1, value.nbytes, on_wait).view(value.dtype).reshape(value.shape)
    block[...] = value
    if out is not None:
        station.device.current().wait(stream.record())
        station.device.copy(out, block)
        return out
    with station.device.using(stream):
        result = station.device.empty(value.shape, value.dtype)
    station.device.current().wait(stream.record())  # work on this memory's previous contents may still run
    station.device.copy(station.device.wrap(result, "result"), block)
    return result


def fetch(calls: StagingQueues, x: DeviceArray, text: str) -> Array:
    """Return a host copy of an array, within a host operation. It is valid until the next call."""
    station = calls.station(x.device)
    value, _ = station.run(text, lambda x, _, on_wait: copy_out(station, x, on_wait), x, x.stream.record(), x)
    return value  # type: ignore[no-any-return]


def deliver(calls: StagingQueues, target: DeviceArray, value: Array, text: str, stream: Any) -> None:
    """Copy host values to a device array and wait for the copy, within a host operation.

    stream: its earlier work may still use the array, so the copy runs after it.
    """
    station = calls.station(target.device)

    def run(x: Array, target: DeviceArray, on_wait: OnWait) -> None:
        block = station.block(1, x.nbytes, on_wait).view(x.dtype)
        block[...] = x
        station.device.copy(target, block)
        wait_for(station.device.current().record(), on_wait)

    station.run(text, run, value, stream.record(), target)
