"""Station: where calls of one group meet one device: a stream of their own, and host memory to go through."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from commlib.devices.protocol import Device, Event, Stream
from commlib.devices.waiting import wait_for
from commlib.dtypes import Array
from commlib.errors import StallError
from commlib.group.group import Group

log = logging.getLogger("commlib")

# Seconds that a device gets to end its work when its group is closed.
LAST = 5.0

# What was given up while a device may still read or write it, which must stay.
_LEFT_BEHIND: list[Any] = []

OnWait = Callable[[], None]

Run = Callable[[Any, Any, OnWait], Any]
"""Do a call on a source and a target of the device, with this thread's current stream; return its value."""


class Station:
    """Runs calls one at a time, in their group's order. The work they queue is done in that order: on one stream, but
    what its caller waits for is on the caller's.

    So what a call reads of a block of host memory is read before the next one's copy into it.
    """

    def __init__(self, group: Group, device: Device) -> None:
        self._group, self.device = group, device
        self._stream, self.way_back = device.stream(), device.stream()
        """The second one is for copies to the device, beside those from it; in order with the first where calls end."""
        self._done: Event | None = None  # behind what the last call has queued
        self._moved: Event | None = (
            None  # the same, of calls on their callers' streams: one event, recorded anew each time
        )
        self._blocks: dict[int, Array] = {}
        # The arrays of calls whose last work is under way: their memory must not be used for anything else.
        self._held: deque[tuple[Event, Any]] = deque()
        self.let_go: Callable[[], None] | None = None
        """What ends the waits of its stream for other ranks."""

    def run(self, text: str, run: Run, x: Any, ready: Event, target: Any) -> tuple[Any, Event]:
        """Do a call on arrays that are `ready` then; return its value, and the event behind all that it has queued."""
        while self._held and self._held[0][0].done():
            self._held.popleft()
        with self.device.using(self._stream):
            self._stream.wait(ready)
            self._await_last(self._stream)
            try:
                value = run(x, target, self._group.watch(f"{text}: copies to and from {self.device.name}", ()))
            finally:
                done = self._done = self._stream.record()
                self._held.append((done, (x, target)))
        return value, done

    def run_there(self, stream: Stream, run: Run, x: Any, target: Any, on_wait: OnWait) -> Any:
        """Do a call, which only queues, on its caller's stream, where its arrays are ready; return its value."""
        self._await_last(stream)
        try:
            if stream == self.device.current():
                return run(x, target, on_wait)
            with self.device.using(stream):
                return run(x, target, on_wait)
        finally:
            self._done = self._moved = stream.record(self._moved)

    def _await_last(self, stream: Stream) -> None:
        """Let a stream wait for the last call. On its own stream, too: another one may have its number by now."""
        if self._done is not None:
            stream.wait(self._done)

    def block(self, number: int, nbytes: int, on_wait: OnWait) -> Array:
        """Return host memory (uint8). The same number is the same memory, for whoever asks for no more than before."""
        block = self._blocks.get(number)
        if block is None or len(block) < nbytes:
            wait_for(self._stream.record(), on_wait)  # it may still be read or written
            block = self._blocks[number] = self.device.staging(nbytes)
        return block[:nbytes]

    def leave(self, reason: str) -> None:
        """End what is under way; with a reason let it go on without the other ranks."""
        if reason and self.let_go is not None:
            self.let_go()
        elif not reason:
            self._end()

    def close(self) -> None:
        """Wait until the device has done what was queued, for a few seconds: also where everything else is given up."""
        self._end()
        self._blocks, self._held = {}, deque()

    def _end(self) -> None:
        event = self._stream.record() if self._done is None else self._done
        deadline = time.monotonic() + LAST

        def on_wait() -> None:
            if time.monotonic() > deadline:
                raise StallError(f"{self._group.name}: {self.device.name} still works after {LAST} s")

        try:
            wait_for(event, on_wait)
        except StallError as error:
            if self.let_go is not None:
                self.let_go()  # the others will not come any more, and whoever frees memory would wait for that
            log.error("%s; its memory is left as it is", error)
            _LEFT_BEHIND.append((self._blocks, self._held))

    def halt(self) -> None:
        """Nothing moves in a forked child."""
