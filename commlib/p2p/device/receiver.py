"""DeviceIn: the receiving direction of a channel between devices: messages are copied from the sender's slots."""

from __future__ import annotations

from collections import deque
from typing import Any

from commlib.devices.array import DeviceArray
from commlib.devices.protocol import Device, Event, Opened
from commlib.p2p.device.flags import NUMBERS, Words
from commlib.p2p.device.host_slots import FoundBetween
from commlib.p2p.device.in_flight import UnderWay


class DeviceIn:
    """See above. Calls are made one after another. hello: what the sender's `DeviceOut.hello` says."""

    def __init__(self, device: Device, depth: int, hello: dict[str, Any]) -> None:
        """Raises TransportError if the device cannot."""
        self._device, self._depth = device, depth
        self.words = Words.found(tuple(hello["words"]), depth)
        self.count = 0
        """How many messages were received."""
        self.under_way = UnderWay(device)
        # Memory of earlier messages with its number, until these happen.
        self._before: deque[tuple[int, Opened, list[Event]]] = deque()
        self._number, self._stride = 0, 0
        self._memory: Opened | None = None
        self._signals = self.words.signals(device, self.words.freed, self.words.filled)
        self.under_way.add(self._signals.trial)

    def turn_to(self, news: str) -> None:
        """Begin with memory of the sender, of which that has told. Raises TransportError."""
        number, by_host, stride, handle = news.split(" ", 3)
        memory = FoundBetween(self._device, handle) if int(by_host) else self._device.open(handle)
        if self._memory is not None:
            self._before.append((self._number, self._memory, self.under_way.pending))
        self._number, self._stride, self._memory = int(number), int(stride), memory

    def take(self, into: DeviceArray) -> None:
        """Queue on the current stream: read the next message once it is there, and tell that its slot is free."""
        slot, number = self.count % self._depth, (self.count + 1) % NUMBERS
        self._signals.hear[slot].meet(number)
        if into.nbytes:
            assert self._memory is not None
            start = self._memory.address + slot * self._stride
            source = DeviceArray(self._device, start, (into.nbytes,), "uint8", self._memory)
            self._device.copy(into.reshape(-1).view("uint8"), source)
        self._signals.tell[slot].meet(number)
        self.count += 1
        self.under_way.note()
        if self._before:
            self._close_before()

    def _close_before(self) -> None:
        """Close earlier memory that nothing reads any more."""
        while self._before and all(event.done() for event in self._before[0][2]):
            number, memory, _ = self._before.popleft()
            memory.close()
            self.words.close_memories(number)

    def let_go(self) -> None:
        """Let go all streams, of both ranks, that wait for one another in this direction."""
        self.words.let_go(self.count)

    def close(self) -> None:
        """Give everything back. Nothing queued here may still use it."""
        for _, memory, _ in self._before:
            memory.close()
        if self._memory is not None:
            self._memory.close()
        self._before.clear()
        self._signals.close()
        self.words.close_memories()
