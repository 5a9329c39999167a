"""DeviceEdge: both directions of a channel between the devices of two ranks, or why there are none.

Each side makes what it sends with, and tells the other, in its letter "hello". Having tried what the other one has
told, it says in a letter "device" what it can. So both know alike which way messages go, and none is under way before
that: between the devices; or, where their streams can meet but cannot address the other's memory, through memory of the
host; or, where they cannot meet, in the host's messages.

A stream waits only for what the other rank's host had queued before this rank's host queued the wait. So it ends by
itself, whatever becomes of the channel, unless the other process ends before its device is done, or loses the device.
For these a thread looks while something is under way: it sets the words, so that the streams go on.
"""

from __future__ import annotations

import logging
import os
import time
from typing import Any

from commlib.devices.protocol import Device
from commlib.errors import TransportError
from commlib.p2p.device.peer_process import PeerProcess
from commlib.p2p.device.receiver import DeviceIn
from commlib.p2p.device.sender import DeviceOut

log = logging.getLogger("commlib")

# Seconds between looks; and for how long a failed channel's streams may go on before they are let go.
LOOK, PATIENCE = 0.05, 10.0


class DeviceEdge:
    """See above. Ends makes it, and keeps it."""

    def __init__(self, device: Device, depth: int, nbytes: int, refusal: str, *, ipc: bool, is_named: bool) -> None:
        """refusal: why messages go by way of the host, as far as both sides know. ipc: devices may share memory."""
        self.device, self._depth, self._is_named = device, depth, is_named
        self.refusal, self.is_expected = refusal, bool(refusal) or not ipc
        """Why messages go by way of the host, "" if they do not; and whether that was known before it was tried."""
        self.apart = "" if ipc else "COMMLIB_DEVICE_IPC=0"
        """Why slots are memory of the host, "" if devices address each other's memory."""
        self.peer = PeerProcess()
        self.outgoing: DeviceOut | None = None
        self.incoming: DeviceIn | None = None
        self.lost = ""
        """Why nothing that was received may be trusted, once streams have been let go."""
        self.is_broken = False
        """Whether the device answers nothing any more."""
        self._failed_at = self._looked_at = 0.0
        self.is_watched = False
        if not refusal:
            try:
                self.outgoing = DeviceOut(device, depth, self.peer, is_named=is_named)
            except TransportError as error:
                self.refusal = str(error)
        if self.outgoing is not None and not self.apart:
            try:
                self.outgoing.make(nbytes)
            except TransportError as error:
                self.apart = str(error)

    # How the two sides meet

    def hello(self) -> dict[str, Any]:
        """Return what the other side must know."""
        told: dict[str, Any] = self.verdict() | {"process": 0 if self._is_named else os.getpid()}
        return told if self.outgoing is None else told | self.outgoing.hello()

    def meet(self, hello: dict[str, Any]) -> None:
        """Try what the other side has told; `refusal` says afterwards what is in the way here."""
        self.peer.meet(hello["process"])
        if self.refusal or hello["refusal"]:
            self.refusal = self.refusal or hello["refusal"]
            return
        try:
            self.incoming = DeviceIn(self.device, self._depth, hello)
        except TransportError as error:
            self.refusal = str(error)
            return
        self.apart = self.apart or hello["apart"]
        if not self.apart:
            try:
                self.incoming.turn_to(hello["memory"])
            except TransportError as error:
                self.apart = str(error)

    def verdict(self) -> dict[str, str]:
        """Return what is in the way on this side, as far as it is known."""
        return {"refusal": self.refusal[:1000], "apart": self.apart[:1000]}

    def settle(self, verdict: dict[str, str]) -> None:
        """Note what is in the way on the other side. From now on it is known which way messages go."""
        self.refusal, self.apart = self.refusal or verdict["refusal"], self.apart or verdict["apart"]
        if self.outgoing is not None:
            self.outgoing.connect()
            if self.apart:
                self.outgoing.turn_to_host()
        if self.refusal and self.is_over:
            self._close_directions()

    # Streams that wait

    @property
    def _directions(self) -> list[DeviceOut | DeviceIn]:
        return [direction for direction in (self.outgoing, self.incoming) if direction is not None]

    @property
    def is_over(self) -> bool:
        """Whether nothing that is queued here uses memory of the channel. Lets streams go that wait in vain."""
        try:
            # In a thread that has used no GPU, to ask would be to begin with the first one, whichever this process has.
            with self.device.using(self.device.current()):
                if not any(direction.under_way.pending for direction in self._directions):
                    return True
        except Exception as error:  # each library of devices has its own
            self._let_go(f"the device of this rank is lost: {error}")
            self.is_broken = True
            return True
        if self.peer.is_gone:
            self._let_go("the process of the other rank is gone")
        elif self._failed_at and time.monotonic() > self._failed_at + PATIENCE:
            self._let_go(f"the channel has failed, and its streams did not end within {PATIENCE} s")
        return False

    @property
    def is_due(self) -> bool:
        """Whether it is time to `look`."""
        return time.monotonic() >= self._looked_at + LOOK

    def look(self) -> bool:
        """Look at streams, on the poller's thread; return whether that is needed no more."""
        self._looked_at = time.monotonic()
        self.is_watched = False  # before the look: what is queued after it is watched anew
        if self.is_over:
            return True
        self.is_watched = True
        return False

    def fail(self) -> None:
        """Note that the channel has failed: what is under way should end soon."""
        self._failed_at = self._failed_at or time.monotonic()

    def _let_go(self, why: str) -> None:
        if not self.lost:
            log.error("a channel's messages under way on %s are lost: %s", self.device.name, why)
        self.lost = self.lost or why
        for direction in self._directions:  # again and again: a stream that goes on may write a word
            direction.let_go()

    # The end

    def part(self, deadline: float) -> None:
        """Wait until nothing queued uses it, for others may still need that; then let streams go that wait."""
        while not self.is_over and time.monotonic() < deadline:
            time.sleep(1e-3)
        late = time.monotonic() + LOOK
        while not self.is_over and time.monotonic() < late:
            self._let_go("the group has ended")
            time.sleep(1e-3)

    def close(self) -> None:
        """Give everything back, once nothing queued uses it: `is_over`."""
        self.peer.give_up()
        self._close_directions()

    def _close_directions(self) -> None:
        outgoing, incoming = self.outgoing, self.incoming
        self.outgoing = self.incoming = None
        if self.is_broken:  # nothing of it can be given back before the process ends
            return
        if incoming is not None:
            incoming.close()
        if outgoing is not None:
            outgoing.close()
