"""DeviceOut: the sending direction of a channel between devices. Messages lie in slots on the sender's device.

Where devices cannot address each other's memory slots are memory of the host, that both do.
"""

from __future__ import annotations

import weakref
from typing import Any

from commlib.devices.array import DeviceArray
from commlib.devices.protocol import Device, Exported
from commlib.p2p.device.deferred_free import give_up, sweep
from commlib.p2p.device.flags import NUMBERS, Words
from commlib.p2p.device.host_slots import MadeBetween
from commlib.p2p.device.in_flight import UnderWay
from commlib.p2p.device.peer_process import PeerProcess

_ALIGNED = 512  # bytes between slots
_GROWTH = 1.5  # by how much slots grow at least, so that they seldom do


class DeviceOut:
    """See above. Calls are made one after another."""

    def __init__(self, device: Device, depth: int, peer: PeerProcess, *, is_named: bool) -> None:
        """peer: who reads the slots. Raises TransportError if streams of two processes cannot meet."""
        self.device, self._depth, self._peer, self._is_named = device, depth, peer, is_named
        self.words, self._made = Words.make(depth, is_named=is_named)
        self.count = 0
        """How many messages were sent."""
        self.by_host = False
        """Whether the slots are memory of the host, as devices cannot address each other's."""
        self.under_way = UnderWay(device)
        self._signals = self.words.signals(device, self.words.filled, self.words.freed)
        self.under_way.add(self._signals.trial)
        self._slots: _Slots | None = None
        self._generation, self._news = 0, ""

    def hello(self) -> dict[str, Any]:
        """Return what the receiver must know."""
        news, self._news = self._news, ""
        return {"words": self._made.place, "memory": news}

    def connect(self) -> None:
        """Note that the receiver has found all that."""
        self._made.withdraw()

    def make(self, nbytes: int) -> None:
        """Make slots of so many bytes each. Raises TransportError."""
        sweep()
        stride = max(-(-nbytes // _ALIGNED) * _ALIGNED, _ALIGNED)
        whole = self._depth * stride
        made: Exported
        if self.by_host:
            made = MadeBetween(self.device, whole, is_named=self._is_named)
        else:
            made = self.device.export(whole)
        slots = _Slots(made, stride)
        self._generation += 1
        words, number, peer = self.words, self._generation, self._peer

        def is_unused() -> bool:
            return words.closed >= number or peer.is_gone

        # Arrays that `lend` gave may outlive all else. At the process' end the driver may be gone before this.
        weakref.finalize(slots, give_up, made.free, is_unused).atexit = False
        self._slots, self._news = slots, f"{number} {int(self.by_host)} {stride} {made.handle}"

    def reserve(self, nbytes: int) -> None:
        """Make room for a message of so many bytes. Raises TransportError if there is none: nothing has changed."""
        stride = 0 if self._slots is None else self._slots.stride
        if nbytes > stride or self._slots is None:
            self.make(max(nbytes, int(_GROWTH * stride)))

    def lend(self, nbytes: int) -> DeviceArray:
        """Return the next slot's memory (uint8), if there is room; the current stream waits until it has been read."""
        self._await_freed()
        return self._slot(nbytes)

    def put(self, x: DeviceArray) -> str:
        """Queue on the current stream: write the next message, unless `lend` gave it, and tell that it is there.

        Return what the receiver must know of new memory, "" if there is none.
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

    def turn_to_host(self) -> None:
        """Let slots be memory of the host from now on: those of the first message, and later ones."""
        self.by_host, self._slots, self._news = True, None, ""

    def let_go(self) -> None:
        """Let go all streams, of both ranks, that wait for one another in this direction."""
        self.words.let_go(self.count)

    def close(self) -> None:
        """Give everything back, memory as soon as the receiver has closed it. Nothing queued here may still use it."""
        self._signals.close()
        self._made.withdraw()
        self._slots = None
        sweep()


class _Slots:
    """Memory of `depth` messages. Whoever holds it keeps it."""

    def __init__(self, exported: Exported, stride: int) -> None:
        self.exported, self.stride = exported, stride
