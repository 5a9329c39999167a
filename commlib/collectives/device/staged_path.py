"""Staged path: copy device arrays to host memory, run the call on a host path, and copy the result back.

It supports every call. Large arrays go in pieces: while the host works on one piece, the device copies the next piece
out and the previous piece back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from commlib.collectives.call import Call
from commlib.collectives.context import PathContext
from commlib.collectives.paths import Path, Verb, find_paths
from commlib.devices.array import DeviceArray
from commlib.devices.host import HOST
from commlib.devices.protocol import DeviceEvent
from commlib.dtypes import Array
from commlib.runtime.compiled_call import CompiledCall


class StagedPath(Path):
    """The path of device arrays through host memory. It runs every call by one of `host_paths`."""

    name, takes_host, takes_devices = "host", False, True

    def __init__(self, host_paths: Sequence[Path]) -> None:
        self._host_paths = host_paths

    def is_named(self, call: Call) -> bool:
        return call.algorithm not in ("nccl", "messages")

    def refusal(self, context: PathContext, verb: Verb, call: Call) -> str:
        return ""

    def compile(self, context: PathContext, verb: Verb, call: Call) -> CompiledCall:
        if call.algorithm == self.name:
            call = replace(call, algorithm="auto")
        host = PathContext(context.group, HOST)
        if not verb.elementwise:
            return StagedCall(context, verb, call, self._compile(host, verb, call))
        parts = cut(call, max(1, context.group.config.staging_kib * 1024 // call.dtype.itemsize))
        compiled = {part: self._compile(host, verb, part) for _, _, part in reversed(parts)}
        return StagedPieces(context, verb, call, [(start, stop, compiled[part]) for start, stop, part in parts])

    def _compile(self, host: PathContext, verb: Verb, call: Call) -> CompiledCall:
        return find_paths(self._host_paths, host, verb, call)[0].compile(host)


class StagedCall(CompiledCall):
    """Copies the source to the host, runs `inner` there and copies the result back."""

    __slots__ = ("_inner", "_queue", "_reads", "_writes")

    def __init__(self, context: PathContext, verb: Verb, call: Call, inner: CompiledCall) -> None:
        super().__init__(context.group.progress, call.text)
        self._queue, self._inner = context.queue, inner
        self._reads, self._writes = reads_and_writes(verb, call, context.group.rank)

    def perform(self, x: Any, target: Any) -> Any:
        queue, device = self._queue, self._queue.device
        source = queue.block(0, x.nbytes).view(x.dtype)
        result = queue.block(1, target.nbytes).view(target.dtype) if self._writes else source
        if self._reads:
            device.copy(source, x)
            queue.wait(device.current().record())
        self._inner.perform(source, result)
        if self._writes:
            device.copy(target, result)
        return target


class StagedPieces(CompiledCall):
    """Does the same piece by piece, in place, with three staging buffers in rotation.

    pieces: each (start, stop, compiled call). The device copies one piece out on the queue's stream and another back on
    a second stream, both while the host works on the piece in between: devices copy in both directions at once.
    """

    __slots__ = ("_dtype", "_longest", "_pieces", "_queue", "_reads", "_writes")

    def __init__(
        self, context: PathContext, verb: Verb, call: Call, pieces: Sequence[tuple[int, int, CompiledCall]]
    ) -> None:
        super().__init__(context.group.progress, call.text)
        self._queue, self._pieces, self._dtype = context.queue, pieces, call.dtype
        self._reads, self._writes = reads_and_writes(verb, call, context.group.rank)
        self._longest = max((stop - start for start, stop, _ in pieces), default=0) * call.dtype.itemsize

    def perform(self, x: Any, target: Any) -> Any:
        queue, device, pieces = self._queue, self._queue.device, self._pieces
        out, back = device.current(), queue.copy_stream
        blocks = [queue.block(number, self._longest).view(self._dtype) for number in range(3)]
        copied: list[DeviceEvent] = []  # the events after the pieces' copies back
        back.wait(out.record())
        next_one = self._fetch(0, x, blocks, copied) if pieces else None
        for number, (start, stop, compiled) in enumerate(pieces):
            assert next_one is not None
            block, event = next_one
            if number + 1 < len(pieces):
                next_one = self._fetch(number + 1, x, blocks, copied)
            queue.wait(event)
            compiled.perform(block, block)
            if self._writes:
                with device.using(back):
                    device.copy(target[start:stop], block)
                copied.append(back.record())
        out.wait(back.record())
        return target

    def _fetch(
        self, number: int, x: DeviceArray, blocks: Sequence[Array], copied: Sequence[DeviceEvent]
    ) -> tuple[Array, DeviceEvent]:
        """Queue the copy of a piece to its block, after the block's last copy back."""
        device, (start, stop, _) = self._queue.device, self._pieces[number]
        block, stream = blocks[number % 3][: stop - start], device.current()
        if self._writes and number >= 3:
            stream.wait(copied[number - 3])
        if self._reads:
            device.copy(block, x[start:stop])
        return block, stream.record()


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
