"""Words: let the streams of two ranks tell each other where the messages of one direction of a channel are.

They are memory of the host that the sender makes, and both ranks and their devices map. Each slot has two words, each
in a cache line of its own: `filled`, the number of the message that the sender's stream has written, and `freed`, that
of the one that the receiver's stream has read. One word for all slots would not do: messages may be sent on several
streams, and the later one may be written first.

    head: memories that the receiver has closed, a word for trials | filled, of each slot | freed, of each slot
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from commlib.buffers.peer_memory import Mapped, PeerMemory, Place
from commlib.devices.protocol import Device, Event, Signals
from commlib.errors import TransportError

_LINE, _PAGE = 64, 4096
_TRIAL = 8

AHEAD = 1 << 30
"""What a stream waits for is behind that, whatever it waits for."""

NUMBERS = 1 << 32

_EVERYTHING = 1 << 62


class Words:
    """Those of one direction, in this process."""

    def __init__(self, memory: Mapped, depth: int) -> None:
        self._memory, self.depth = memory, depth
        self._head = memory.array(0, _LINE).view(np.int64)
        self.filled = [memory.address + (1 + slot) * _LINE for slot in range(depth)]
        """Addresses, by slot."""
        self.freed = [memory.address + (1 + depth + slot) * _LINE for slot in range(depth)]

    @classmethod
    def make(cls, depth: int, *, is_named: bool) -> tuple[Words, PeerMemory]:
        """Return new ones, and what lets the other process find them. Raises TransportError."""
        made = PeerMemory(-(-(1 + 2 * depth) * _LINE // _PAGE) * _PAGE, is_named=is_named)
        return cls(made.memory, depth), made

    @classmethod
    def found(cls, place: Place, depth: int) -> Words:
        """Return those that another rank has made. Raises TransportError."""
        try:
            return cls(Mapped(place), depth)
        except OSError as error:
            raise TransportError(f"cannot map the words of another rank's streams: {error}") from error

    @property
    def closed(self) -> int:
        """How many memories of the sender the receiver has closed."""
        return int(self._head[0])

    def close_memories(self, count: int | None = None) -> None:
        """Say that the receiver has closed so many, or all, those that it has never opened included."""
        self._head[0] = _EVERYTHING if count is None else count

    def let_go(self, number: int) -> None:
        """Let go all streams that wait for any message up to `number` and some more."""
        for word in (*self.filled, *self.freed):
            ctypes.c_uint32.from_address(word).value = (number + AHEAD) % NUMBERS

    def signals(self, device: Device, tell: Sequence[int], hear: Sequence[int]) -> SlotSignals:
        """Return what tells and hears words, by their addresses in each slot. Raises TransportError."""
        return SlotSignals(device, self._memory, tell, hear)


class SlotSignals:
    """Signals of each slot. Those that tell are apart from those that hear."""

    def __init__(self, device: Device, memory: Mapped, tell: Sequence[int], hear: Sequence[int]) -> None:
        self._all = [
            device.signals(HostMemory(memory, [memory.address]), [], [])
        ]  # the device comes to know the memory
        known: Any = HostMemory(memory, [])
        try:
            self.tell: list[Signals] = [device.signals(known, [word], []) for word in tell]
            self.hear: list[Signals] = [device.signals(known, [], [word]) for word in hear]
            trial = device.signals(known, [memory.address + _TRIAL], [memory.address + _TRIAL])
            self._all += [*self.tell, *self.hear, trial]
            # What the driver cannot do it says when it is first asked to.
            with device.using(device.stream()):
                trial.meet(1)
                self.trial: Event = device.current().record()
                """Something queued that uses them already."""
        except TransportError:
            self.close()
            raise

    def close(self) -> None:
        """Give them back. Nothing queued may still use them. Idempotent."""
        while self._all:
            self._all.pop().close()


class HostMemory:
    """See `protocols.SharedMemory`. bases: [] where the device knows the memory already."""

    def __init__(self, memory: Mapped, bases: list[int]) -> None:
        self.memory, self.bases, self.nbytes = memory, bases, memory.nbytes

    def close(self) -> None:
        """Nothing: the memory goes with its last user."""
