"""Staging queue: run the calls of one group on one device, with a private stream and host staging buffers."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from commlib.devices.protocol import Device, DeviceEvent, Stream
from commlib.devices.waiting import wait_for
from commlib.dtypes import Array
from commlib.errors import StallError
from commlib.group.waits import Waits

log = logging.getLogger("commlib")

# Seconds to wait for the device's work when the group is closed.
LAST = 5.0

# Abandoned memory that a device may still read or write. It must never be freed.
_LEFT_BEHIND: list[Any] = []

Run = Callable[[Any, Any], Any]
"""Run a call on a source and a target of the device, on this thread's current stream; return its value."""


class StagingQueue:
    """Run calls one at a time, in their group's order. The device does their queued work in that order, too.

    The work goes to one private stream; calls that only queue use their caller's stream (`run_on_stream`). Because of
    the order, the device has read a host block before the next call copies into it.
    """

    def __init__(self, waits: Waits, device: Device) -> None:
        self._waits, self.device = waits, device
        self._stream, self.copy_stream = device.stream(), device.stream()
        """The second stream copies to the device while the first copies from it. A call ends when both are done."""
        self._done: DeviceEvent | None = None  # after the last call's queued work
        self._moved: DeviceEvent | None = None  # the same for calls on their callers' streams: recorded again each time
        self._blocks: dict[int, Array] = {}
        # The arrays of calls whose work may still run: their memory must not be reused.
        self._held: deque[tuple[DeviceEvent, Any]] = deque()
        self._text = ""  # of the running call
        self._is_closed = False
        self.let_go: Callable[[], None] | None = None
        """A function that ends the stream's waits for other ranks."""

    def run(self, text: str, run: Run, x: Any, ready: DeviceEvent, target: Any) -> tuple[Any, DeviceEvent]:
        """Run a call after event `ready`; return its value, and the event after its queued work."""
        while self._held and self._held[0][0].done():
            self._held.popleft()
        with self.device.using(self._stream):
            self._stream.wait(ready)
            self._await_last(self._stream)
            self._text = text
            try:
                value = run(x, target)
            finally:
                done = self._done = self._stream.record()
                self._held.append((done, (x, target)))
        return value, done

    def run_on_stream(self, stream: Stream, run: Run, x: Any, target: Any) -> Any:
        """Run a call that only queues work, on its caller's stream; return its value."""
        self._await_last(stream)
        try:
            if stream == self.device.current():
                return run(x, target)
            with self.device.using(stream):
                return run(x, target)
        finally:
            self._done = self._moved = stream.record(self._moved)

    def _await_last(self, stream: Stream) -> None:
        """Let a stream wait for the last call, even on the same stream: a new stream may have reused its number."""
        if self._done is not None:
            stream.wait(self._done)

    def wait(self, event: DeviceEvent) -> None:
        """Block until the device's work before `event` is done, within the running call."""
        if not event.done():
            wait_for(event, self._waits.watch(f"{self._text}: copies to and from {self.device.name}", ()))

    def block(self, number: int, nbytes: int) -> Array:
        """Return a host staging buffer (uint8). The same number returns the same memory, unless it has to grow."""
        block = self._blocks.get(number)
        if block is None or len(block) < nbytes:
            self.wait(self._stream.record())  # the device may still use the old block
            block = self._blocks[number] = self.device.staging(nbytes)
        return block[:nbytes]

    def leave(self, reason: str) -> None:
        """Wait for the queued work; with a reason, release its waits for other ranks instead."""
        if reason and self.let_go is not None:
            self.let_go()
        elif not reason:
            self._end()

    def close(self) -> None:
        """Wait up to LAST seconds for the queued work and drop the memory. Also called after an abort. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._end()
        self._blocks, self._held = {}, deque()

    def _end(self) -> None:
        event = self._stream.record() if self._done is None else self._done
        deadline = time.monotonic() + LAST

        def on_wait() -> None:
            if time.monotonic() > deadline:
                raise StallError(f"{self._waits.name}: {self.device.name} has queued work left after {LAST} s")

        try:
            wait_for(event, on_wait)
        except StallError as error:
            if self.let_go is not None:
                self.let_go()  # the other ranks will not arrive, and freeing memory would wait for the stream
            log.error("%s; its buffers are leaked", error)
            _LEFT_BEHIND.append((self._blocks, self._held))

    def halt(self) -> None:
        """Do nothing: a forked child moves no data."""
