"""Slot flags: synchronize the streams of two ranks over the slots of one direction of a channel.

The sender makes the flags in host memory, and both ranks and their devices map it. Each slot has two flags, each in a
separate cache line. `filled` is the number of the message that the sender's stream has written; `freed` is the number
of the message that the receiver's stream has read. One flag for all slots is not enough: messages may be sent on
several streams, and a later message may be written first.

    header: memories that the receiver has closed, a flag for the trial | filled, of each slot | freed, of each slot
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from commlib.buffers.peer_memory import MemoryPlace, PeerMapping, PeerMemory
from commlib.devices.protocol import Device, DeviceEvent, Signals
from commlib.errors import TransportError

_LINE, _PAGE = 64, 4096
_TRIAL = 8

AHEAD = 1 << 30
"""A number this far ahead satisfies every wait of a stream."""

NUMBERS = 1 << 32

_EVERYTHING = 1 << 62


class SlotFlags:
    """The flags of one direction, as mapped by this process."""

    def __init__(self, memory: PeerMapping, depth: int) -> None:
        self._memory, self.depth = memory, depth
        self._head = memory.array(0, _LINE).view(np.int64)
        self.filled = [memory.address + (1 + slot) * _LINE for slot in range(depth)]
        """Addresses, by slot."""
        self.freed = [memory.address + (1 + depth + slot) * _LINE for slot in range(depth)]

    @classmethod
    def make(cls, depth: int, *, is_named: bool) -> tuple[SlotFlags, PeerMemory]:
        """Return new flags, and their memory for the other process. Raises TransportError."""
        peer_memory = PeerMemory(-(-(1 + 2 * depth) * _LINE // _PAGE) * _PAGE, is_named=is_named)
        return cls(peer_memory.memory, depth), peer_memory

    @classmethod
    def open(cls, place: MemoryPlace, depth: int) -> SlotFlags:
        """Return the flags that another rank has made. Raises TransportError."""
        try:
            return cls(PeerMapping(place), depth)
        except OSError as error:
            raise TransportError(f"cannot map the flags of another rank's streams: {error}") from error

    @property
    def closed(self) -> int:
        """The number of the sender's slot memories that the receiver has closed."""
        return int(self._head[0])

    def close_memories(self, count: int | None = None) -> None:
        """Report that the receiver has closed `count` slot memories; None: all, even those it never opened."""
        self._head[0] = _EVERYTHING if count is None else count

    def let_go(self, number: int) -> None:
        """Release all streams that wait for a message up to `number` + AHEAD."""
        for word in (*self.filled, *self.freed):
            ctypes.c_uint32.from_address(word).value = (number + AHEAD) % NUMBERS

    def signals(self, device: Device, writes: Sequence[int], waits: Sequence[int]) -> SlotSignals:
        """Return signals that write flags (`writes`) and wait for flags (`waits`), by slot. Raises TransportError."""
        return SlotSignals(device, self._memory, writes, waits)


class SlotSignals:
    """One signal for each slot that writes its flag, and one that waits for it."""

    def __init__(self, device: Device, memory: PeerMapping, writes: Sequence[int], waits: Sequence[int]) -> None:
        self._all = [
            device.signals(HostMemory(memory, [memory.address]), [], [])
        ]  # registers the memory with the device
        host: Any = HostMemory(memory, [])
        try:
            self.writes: list[Signals] = [device.signals(host, [word], []) for word in writes]
            self.waits: list[Signals] = [device.signals(host, [], [word]) for word in waits]
            trial = device.signals(host, [memory.address + _TRIAL], [memory.address + _TRIAL])
            self._all += [*self.writes, *self.waits, trial]
            # The driver reports missing support only on the first use.
            with device.using(device.stream()):
                trial.queue(1)
                self.trial: DeviceEvent = device.current().record()
                """The event after the trial, which uses the flags."""
        except TransportError:
            self.close()
            raise

    def close(self) -> None:
        """Free the signals. No queued work may still use them. Idempotent."""
        while self._all:
            self._all.pop().close()


class HostMemory:
    """A mapping as `protocols.SharedMemory`. bases: [] if the memory is already registered with the device."""

    def __init__(self, memory: PeerMapping, bases: list[int]) -> None:
        self.memory, self.bases, self.nbytes = memory, bases, memory.nbytes

    def close(self) -> None:
        """Do nothing: the memory is freed with its last user."""
