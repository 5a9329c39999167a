"""Device sender: the sending direction of a channel between devices. Its slots are memory of the sender's device.

If the devices cannot address each other's memory, the slots are host memory, which both devices can address.
"""

from __future__ import annotations

import weakref
from typing import Any

from commlib.devices.array import DeviceArray
from commlib.devices.protocol import Device, ExportedMemory
from commlib.p2p.device.deferred_free import defer_free, sweep
from commlib.p2p.device.flags import NUMBERS, SlotFlags
from commlib.p2p.device.host_slots import HostSlotOwner
from commlib.p2p.device.in_flight import InFlight
from commlib.p2p.device.peer_process import PeerProcess

_ALIGNED = 512  # bytes between slots
_GROWTH = 1.5  # the least factor by which slots grow, so they seldom grow


class SlotSender:
    """The sending direction. Not thread-safe."""

    def __init__(self, device: Device, depth: int, peer: PeerProcess, *, is_named: bool) -> None:
        """peer: the process that reads the slots. Raises TransportError if the device has no stream signals."""
        self.device, self._depth, self._peer, self._is_named = device, depth, peer, is_named
        self.words, self._made = SlotFlags.make(depth, is_named=is_named)
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
        return {"words": self._made.place, "memory": news}

    def connect(self) -> None:
        """Note that the receiver has mapped the flags."""
        self._made.withdraw()

    def make(self, nbytes: int) -> None:
        """Make slots of `nbytes` each. Raises TransportError."""
        sweep()
        stride = max(-(-nbytes // _ALIGNED) * _ALIGNED, _ALIGNED)
        whole = self._depth * stride
        made: ExportedMemory
        if self.by_host:
            made = HostSlotOwner(self.device, whole, is_named=self._is_named)
        else:
            made = self.device.export(whole)
        slots = _Slots(made, stride)
        self._generation += 1
        words, number, peer = self.words, self._generation, self._peer

        def is_unused() -> bool:
            return words.closed >= number or peer.is_gone

        # Arrays from `lend` may outlive this object. At process exit the driver may be gone before a finalizer runs.
        weakref.finalize(slots, defer_free, made.free, is_unused).atexit = False
        self._slots, self._news = slots, f"{number} {int(self.by_host)} {stride} {made.handle}"

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
        self._signals.tell[self.count % self._depth].meet((self.count + 1) % NUMBERS)
        self.count += 1
        self.under_way.note()
        news, self._news = self._news, ""
        return news

    def _await_freed(self) -> None:
        if self.count >= self._depth:
            self._signals.hear[self.count % self._depth].meet((self.count + 1 - self._depth) % NUMBERS)

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
        self._made.withdraw()
        self._slots = None
        sweep()


class _Slots:
    """Memory of `depth` messages. It lives as long as this object."""

    def __init__(self, exported: ExportedMemory, stride: int) -> None:
        self.exported, self.stride = exported, stride
