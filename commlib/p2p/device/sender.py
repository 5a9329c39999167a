"""Device sender: the sending direction of a channel between devices. Its slots are memory of the sender's device.

If the devices cannot address each other's memory, the slots are host memory, which both devices can address. Slots are
freed once the other side has closed them, or its process has ended.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from commlib.buffers import shared_memory
from commlib.devices.array import DeviceArray
from commlib.devices.protocol import Device, ExportedMemory
from commlib.p2p.device.flags import NUMBERS, SlotFlags
from commlib.p2p.device.host_slots import HostSlotOwner
from commlib.p2p.device.in_flight import InFlight

_ALIGNED = 512  # bytes between slots
_GROWTH = 1.5  # the least factor by which slots grow, so they rarely grow


class SlotSender:
    """The sending direction. Not thread-safe."""

    def __init__(self, device: Device, depth: int, peer: PeerProcess, *, is_named: bool) -> None:
        """peer: the process that reads the slots. Raises TransportError if the device has no stream signals."""
        self.device, self._depth, self._peer, self._is_named = device, depth, peer, is_named
        self.words, self._flag_memory = SlotFlags.make(depth, is_named=is_named)
        self.count = 0
        """The number of sent messages."""
        self.by_host = False
        """Whether the slots are in host memory, because the devices cannot address each other's memory."""
        self.under_way = InFlight(device)
        self._signals = self.words.signals(device, self.words.filled, self.words.freed)
        self.under_way.add(self._signals.trial)
        self._slots: _Slots | None = None
        self._generation, self._news = 0, ""

    def hello(self) -> dict[str, Any]:
        """Return the content of the hello message for the receiver."""
        news, self._news = self._news, ""
        return {"words": self._flag_memory.place, "memory": news}

    def connect(self) -> None:
        """Note that the receiver has mapped the flags."""
        self._flag_memory.withdraw()

    def make(self, nbytes: int) -> None:
        """Make slots of `nbytes` each. Raises TransportError."""
        free_unused()
        stride = max(-(-nbytes // _ALIGNED) * _ALIGNED, _ALIGNED)
        whole = self._depth * stride
        exported: ExportedMemory
        if self.by_host:
            exported = HostSlotOwner(self.device, whole, is_named=self._is_named)
        else:
            exported = self.device.export(whole)
        slots = _Slots(exported, stride)
        self._generation += 1
        words, number, peer = self.words, self._generation, self._peer

        def is_unused() -> bool:
            return words.closed >= number or peer.has_exited

        # Arrays from `lend` may outlive this object. At exit the driver may be unloaded before a finalizer runs.
        weakref.finalize(slots, defer_free, exported.free, is_unused).atexit = False
        self._slots, self._news = slots, f"{number} {int(self.by_host)} {stride} {exported.handle}"

    def reserve(self, nbytes: int) -> None:
        """Make room for a message of `nbytes`. Raises TransportError if there is none; then nothing has changed."""
        stride = 0 if self._slots is None else self._slots.stride
        if nbytes > stride or self._slots is None:
            self.make(max(nbytes, int(_GROWTH * stride)))

    def lend(self, nbytes: int) -> DeviceArray:
        """Return the next slot's memory (uint8); the current stream waits until its previous message was read."""
        self._await_freed()
        return self._slot(nbytes)

    def put(self, x: DeviceArray) -> str:
        """Queue on the current stream: copy the next message to its slot, unless `lend` gave it, and set its flag.

        Return the description of new slot memory for the receiver, "" if there is none.
        """
        self._await_freed()
        slot = self._slot(x.nbytes)
        if x.nbytes and x.address != slot.address:
            self.device.copy(slot, x.reshape(-1).view("uint8"))
        self._signals.writes[self.count % self._depth].queue((self.count + 1) % NUMBERS)
        self.count += 1
        self.under_way.note()
        news, self._news = self._news, ""
        return news

    def _await_freed(self) -> None:
        if self.count >= self._depth:
            self._signals.waits[self.count % self._depth].queue((self.count + 1 - self._depth) % NUMBERS)

    def _slot(self, nbytes: int) -> DeviceArray:
        assert self._slots is not None
        start = self._slots.exported.address + self.count % self._depth * self._slots.stride
        return DeviceArray(self.device, start, (nbytes,), "uint8", self._slots)

    def use_host_slots(self) -> None:
        """Use host memory for all slots, from the first message on."""
        self.by_host, self._slots, self._news = True, None, ""

    def let_go(self) -> None:
        """Release all streams, of both ranks, that wait in this direction."""
        self.words.let_go(self.count)

    def close(self) -> None:
        """Free everything; the slots when the receiver has closed them. No queued work may still use it."""
        self._signals.close()
        self._flag_memory.withdraw()
        self._slots = None
        free_unused()


class _Slots:
    """Memory of `depth` messages. It lives as long as this object."""

    def __init__(self, exported: ExportedMemory, stride: int) -> None:
        self.exported, self.stride = exported, stride


# (free function, is-unused function). A finalizer may run in any thread, and inside another finalizer.
_deferred: list[tuple[Callable[[], None], Callable[[], bool]]] = []
_lock = threading.RLock()


def defer_free(free: Callable[[], None], is_unused: Callable[[], bool]) -> None:
    """Call `free` as soon as `is_unused` returns True: now, or in a later call of this module."""
    with _lock:
        _deferred.append((free, is_unused))


def free_unused() -> None:
    """Free all memory that no process has open any more."""
    with _lock:
        deferred, _deferred[:] = _deferred[:], []
    still_used = []
    for pair in deferred:
        if pair[1]():
            pair[0]()
        else:
            still_used.append(pair)
    with _lock:
        _deferred.extend(still_used)


class PeerProcess:
    """The other side's process, unknown until `identify`."""

    def __init__(self) -> None:
        self._number, self._connect_time = 0, 0.0
        self._has_exited = False

    def identify(self, number: int) -> None:
        """Set its process id; 0 if the id has no meaning on this side."""
        self._number, self._connect_time = number, time.time()

    def give_up(self) -> None:
        """Treat the process as ended if it is still unknown: nothing waits for it any more."""
        self._has_exited = self._has_exited or not self._connect_time

    @property
    def has_exited(self) -> bool:
        """Whether the process has ended."""
        if not self._has_exited and self._number not in (0, os.getpid()):
            self._has_exited = not shared_memory.may_own(self._number, self._connect_time)
        return self._has_exited
