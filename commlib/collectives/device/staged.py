"""Staged: the way of device arrays through host memory. Any call can go this way, by any path of the host's.

Large arrays go in pieces: while the host works on one, the next is on its way out and the last on its way back.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

from commlib.collectives.call import Call
from commlib.collectives.device.call import DeviceCall
from commlib.collectives.device.staging_queue import OnWait, Run, Station
from commlib.collectives.paths import Path, Verb, compile_call
from commlib.devices.array import DeviceArray
from commlib.devices.protocol import Device
from commlib.devices.waiting import wait_for
from commlib.dtypes import Array
from commlib.group.group import Group
from commlib.runtime.compiled import Compiled


class Stations(Protocol):
    """Keep a group's stations."""

    def station(self, device: Device) -> Station: ...


class Staged:
    """See `ways.Way`. It is always there, and takes every call."""

    name, refusal, is_open, only_queues = "host", "", True, False

    def __init__(self, paths: tuple[Path, ...], group: Group, station: Station) -> None:
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
            made = {part: compile_call(paths, group, verb, part) for _, _, part in reversed(parts)}
            return in_pieces(
                station, [(start, stop, made[part]) for start, stop, part in parts], group.rank, verb, call
            )
        return through_host(station, compile_call(paths, group, verb, call), group.rank, verb, call)


def made_on_device(group: Group, station: Station, compiled: Compiled, out: DeviceArray | None = None) -> DeviceCall:
    """Return the same for a call that makes its result itself: an array, or a tuple of that and of what stays here.

    out: where to put the array.
    """
    if group.transport.accepts(station.device.name):
        return DeviceCall(group.progress, compiled.text, station, lambda x, *_: compiled.perform(x, x))

    def run(x: DeviceArray, target: DeviceArray, on_wait: OnWait) -> Any:
        source = fetched(station, x, on_wait)
        value = compiled.perform(source, source)
        if isinstance(value, tuple):
            return delivered(station, value[0], x.stream, on_wait, out), *value[1:]
        return delivered(station, value, x.stream, on_wait)

    return DeviceCall(group.progress, compiled.text, station, run)


def through_host(station: Station, whole: Compiled, rank: int, verb: Verb, call: Call) -> Run:
    """Return what copies arrays to the host, runs a call there and copies its result back."""
    reads, writes = moves(verb, call, rank)

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


def in_pieces(station: Station, pieces: list[tuple[int, int, Compiled]], rank: int, verb: Verb, call: Call) -> Run:
    """Return what does the same piece by piece, each (start, stop, compiled call), in place in three blocks in turn.

    One piece is copied out on the station's stream while the host works on the one before and the one before that is
    copied in on another: a device copies both ways at once.
    """
    reads, writes = moves(verb, call, rank)
    longest = max((stop - start for start, stop, _ in pieces), default=0) * call.dtype.itemsize

    def run(x: DeviceArray, target: DeviceArray, on_wait: OnWait) -> None:
        device, out, back = station.device, station.device.current(), station.way_back
        blocks = [station.block(number, longest, on_wait).view(call.dtype) for number in range(3)]
        free: list[Any] = [None] * 3  # when what a block had before is in its place
        back.wait(out.record())

        def fetch(number: int) -> tuple[Array, Any]:
            start, stop, _ = pieces[number]
            block = blocks[number % 3][: stop - start]
            if free[number % 3] is not None:
                out.wait(free[number % 3])
            if reads:
                device.copy(block, x[start:stop])
            return block, out.record()

        under_way = [fetch(0)] if pieces else []
        for number, (start, stop, compiled) in enumerate(pieces):
            block, there = under_way.pop()
            if number + 1 < len(pieces):
                under_way.append(fetch(number + 1))
            wait_for(there, on_wait)
            compiled.perform(block, block)
            if writes:
                with device.using(back):
                    device.copy(target[start:stop], block)
                free[number % 3] = back.record()
        out.wait(back.record())

    return run


def moves(verb: Verb, call: Call, rank: int) -> tuple[bool, bool]:
    """Return whether this rank's array is read, and whether it gets a result."""
    if verb.name == "broadcast":
        return rank == call.root, rank != call.root
    return True, call.root in (-1, rank) and (verb.name != "exscan" or rank > 0)


def cut(call: Call, count: int) -> list[tuple[int, int, Call]]:
    """Return the calls on `count` elements each that make up a call, and what of the arrays they take."""
    if call.count <= count:
        return [(0, call.count, call)]
    starts = range(0, call.count, count)
    return [
        (start, stop, replace(call, size=stop - start, whole=call.count))
        for start in starts
        for stop in [min(start + count, call.count)]
    ]


def fetched(station: Station, x: DeviceArray, on_wait: OnWait) -> Array:
    """Return the host's copy of an array."""
    block: Array = station.block(0, x.nbytes, on_wait).view(x.dtype).reshape(x.shape)
    station.device.copy(block, x)
    wait_for(station.device.current().record(), on_wait)
    return block


def delivered(station: Station, value: Array, stream: Any, on_wait: OnWait, out: DeviceArray | None = None) -> Any:
    """Return a new array of the device with the values of a host array, which arrive in the stream's order.

    out: where to put them instead. A new one is memory of the caller's `stream`: a device may use that again as soon as
    this stream comes to its end.
    """
    block = station.block(1, value.nbytes, on_wait).view(value.dtype).reshape(value.shape)
    block[...] = value
    if out is not None:
        station.device.current().wait(stream.record())
        station.device.copy(out, block)
        return out
    with station.device.using(stream):
        made = station.device.empty(value.shape, value.dtype)
    station.device.current().wait(stream.record())  # who had this memory before may still use it
    station.device.copy(station.device.wrap(made, "result"), block)
    return made


def fetch(calls: Stations, x: DeviceArray, text: str) -> Array:
    """Return the host's copy of an array, within an operation of the host's; it stays until the next call."""
    station = calls.station(x.device)
    value, _ = station.run(text, lambda x, _, on_wait: fetched(station, x, on_wait), x, x.stream.record(), x)
    return value  # type: ignore[no-any-return]


def deliver(calls: Stations, target: DeviceArray, value: Array, text: str, stream: Any) -> None:
    """Copy host values to an array, and wait until they are there, within an operation of the host's.

    stream: what was queued there before may use the array.
    """
    station = calls.station(target.device)

    def run(x: Array, target: DeviceArray, on_wait: OnWait) -> None:
        block = station.block(1, x.nbytes, on_wait).view(x.dtype)
        block[...] = x
        station.device.copy(target, block)
        wait_for(station.device.current().record(), on_wait)

    station.run(text, run, value, stream.record(), target)
