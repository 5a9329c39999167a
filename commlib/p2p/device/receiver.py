"""Device receiver: the receiving direction of a channel between devices. It copies messages from the sender's slots."""

from __future__ import annotations

from collections import deque
from typing import Any

from commlib.devices.array import DeviceArray
from commlib.devices.protocol import Device, DeviceEvent, OpenedMemory
from commlib.p2p.device.flags import NUMBERS, SlotFlags
from commlib.p2p.device.host_slots import HostSlotMapping
from commlib.p2p.device.in_flight import InFlight


class SlotReceiver:
    """The receiving direction. Not thread-safe. hello: from the sender's `SlotSender.hello`."""

    def __init__(self, device: Device, depth: int, hello: dict[str, Any]) -> None:
        """Raises TransportError if the device cannot wait for the sender's flags."""
        self._device, self._depth = device, depth
        self.words = SlotFlags.open(tuple(hello["words"]), depth)
        self.count = 0
        """The number of received messages."""
        self.under_way = InFlight(device)
        # Earlier slot memory with its number, and the events after which it is unused.
        self._before: deque[tuple[int, OpenedMemory, list[DeviceEvent]]] = deque()
        self._number, self._stride = 0, 0
        self._memory: OpenedMemory | None = None
        self._signals = self.words.signals(device, self.words.freed, self.words.filled)
        self.under_way.add(self._signals.trial)

    def switch_memory(self, news: str) -> None:
        """Switch to new slot memory that the sender has announced. Raises TransportError."""
        number, by_host, stride, handle = news.split(" ", 3)
        memory = HostSlotMapping(self._device, handle) if int(by_host) else self._device.open(handle)
        if self._memory is not None:
            self._before.append((self._number, self._memory, self.under_way.pending))
        self._number, self._stride, self._memory = int(number), int(stride), memory

    def take(self, into: DeviceArray) -> None:
        """Queue on the current stream: wait for the next message, copy it, and set the flag that frees its slot."""
        slot, number = self.count % self._depth, (self.count + 1) % NUMBERS
        self._signals.waits[slot].queue(number)
        if into.nbytes:
            assert self._memory is not None
            start = self._memory.address + slot * self._stride
            source = DeviceArray(self._device, start, (into.nbytes,), "uint8", self._memory)
            self._device.copy(into.reshape(-1).view("uint8"), source)
        self._signals.writes[slot].queue(number)
        self.count += 1
        self.under_way.note()
        if self._before:
            self._close_before()

    def _close_before(self) -> None:
        """Close earlier slot memory that no queued work reads any more."""
        while self._before and all(event.done() for event in self._before[0][2]):
            number, memory, _ = self._before.popleft()
            memory.close()
            self.words.close_memories(number)

    def let_go(self) -> None:
        """Release all streams, of both ranks, that wait in this direction."""
        self.words.let_go(self.count)

    def close(self) -> None:
        """Free everything. No queued work of this rank may still use it."""
        for _, memory, _ in self._before:
            memory.close()
        if self._memory is not None:
            self._memory.close()
        self._before.clear()
        self._signals.close()
        self.words.close_memories()
