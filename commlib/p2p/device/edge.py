"""DeviceEdge: both directions of a channel between the devices of two ranks, or why they are not available.

Each side makes its sender and describes it in its "hello" message. It tries the other side's sender and reports the
result in a "device" message. So both sides choose the same path, before the first data message:

- between the devices;
- through shared host memory, if the streams can synchronize but the devices cannot address each other's memory;
- in host messages, if the streams cannot synchronize.

A stream waits only for work that the other rank had queued before this rank queued the wait. So every wait ends by
itself, unless the other process dies or loses its device before the work is done. While messages are in flight, the
poller's thread checks for this; then it sets the flags, so that the streams continue.
"""

from __future__ import annotations

import logging
import os
import time
from typing import Any

from commlib.devices.protocol import Device
from commlib.errors import TransportError
from commlib.p2p.device.receiver import SlotReceiver
from commlib.p2p.device.sender import PeerProcess, SlotSender

log = logging.getLogger("commlib")

# Seconds between checks; and seconds for a failed channel's streams to finish before they are released.
LOOK, PATIENCE = 0.05, 10.0


class DeviceEdge:
    """Both directions of a device channel. `Ends` makes and owns it."""

    def __init__(self, device: Device, depth: int, nbytes: int, refusal: str, *, ipc: bool, is_named: bool) -> None:
        """refusal: why data must go in host messages, if known in advance. ipc: devices may share memory."""
        self.device, self._depth, self._is_named = device, depth, is_named
        self.refusal, self.is_expected = refusal, bool(refusal) or not ipc
        """Why data goes in host messages, "" if it does not; and whether this was expected from the settings."""
        self.host_slots_reason = "" if ipc else "COMMLIB_DEVICE_IPC=0"
        """Why the slots are in host memory, "" if the devices address each other's memory."""
        self.peer = PeerProcess()
        self.outgoing: SlotSender | None = None
        self.incoming: SlotReceiver | None = None
        self.lost = ""
        """Why received data is invalid, once streams were released; "" before."""
        self.is_broken = False
        """Whether the device no longer responds."""
        self._failed_at = self._looked_at = 0.0
        self.is_watched = False
        if not refusal:
            try:
                self.outgoing = SlotSender(device, depth, self.peer, is_named=is_named)
            except TransportError as error:
                self.refusal = str(error)
        if self.outgoing is not None and not self.host_slots_reason:
            try:
                self.outgoing.make(nbytes)
            except TransportError as error:
                self.host_slots_reason = str(error)

    # The handshake of the two sides

    def hello(self) -> dict[str, Any]:
        """Return the content of this side's hello message."""
        content: dict[str, Any] = self.verdict() | {"process": 0 if self._is_named else os.getpid()}
        return content if self.outgoing is None else content | self.outgoing.hello()

    def accept(self, hello: dict[str, Any]) -> None:
        """Try the other side's sender; set `refusal` and `host_slots_reason` to the obstacles found here."""
        self.peer.identify(hello["process"])
        if self.refusal or hello["refusal"]:
            self.refusal = self.refusal or hello["refusal"]
            return
        try:
            self.incoming = SlotReceiver(self.device, self._depth, hello)
        except TransportError as error:
            self.refusal = str(error)
            return
        self.host_slots_reason = self.host_slots_reason or hello["host_slots_reason"]
        if not self.host_slots_reason:
            try:
                self.incoming.switch_memory(hello["memory"])
            except TransportError as error:
                self.host_slots_reason = str(error)

    def verdict(self) -> dict[str, str]:
        """Return the obstacles found on this side."""
        return {"refusal": self.refusal[:1000], "host_slots_reason": self.host_slots_reason[:1000]}

    def settle(self, verdict: dict[str, str]) -> None:
        """Add the other side's obstacles. From now on the path of messages is decided."""
        self.refusal, self.host_slots_reason = (
            self.refusal or verdict["refusal"],
            self.host_slots_reason or verdict["host_slots_reason"],
        )
        if self.outgoing is not None:
            self.outgoing.connect()
            if self.host_slots_reason:
                self.outgoing.use_host_slots()
        if self.refusal and self.is_over:
            self._close_directions()

    # Streams that wait

    @property
    def _directions(self) -> list[SlotSender | SlotReceiver]:
        return [direction for direction in (self.outgoing, self.incoming) if direction is not None]

    @property
    def is_over(self) -> bool:
        """Whether no queued work of this rank uses the channel. Releases streams that wait for a lost peer."""
        try:
            # In a thread without a current GPU, a query would initialize GPU 0, whichever GPU this process uses.
            with self.device.using(self.device.current()):
                if not any(direction.under_way.pending for direction in self._directions):
                    return True
        except Exception as error:  # each device library has its own error class
            self._let_go(f"the device of this rank is lost: {error}")
            self.is_broken = True
            return True
        if self.peer.has_exited:
            self._let_go("the process of the other rank is gone")
        elif self._failed_at and time.monotonic() > self._failed_at + PATIENCE:
            self._let_go(f"the channel has failed, and its streams did not end within {PATIENCE} s")
        return False

    @property
    def is_due(self) -> bool:
        """Whether it is time to call `look`."""
        return time.monotonic() >= self._looked_at + LOOK

    def look(self) -> bool:
        """Check the streams, on the poller's thread; return whether no more checks are needed."""
        self._looked_at = time.monotonic()
        self.is_watched = False  # before the check: work queued after it starts a new watch
        if self.is_over:
            return True
        self.is_watched = True
        return False

    def fail(self) -> None:
        """Note that the channel has failed: its queued work must end within PATIENCE seconds."""
        self._failed_at = self._failed_at or time.monotonic()

    def _let_go(self, why: str) -> None:
        if not self.lost:
            log.error("a channel's messages in flight on %s are lost: %s", self.device.name, why)
        self.lost = self.lost or why
        for direction in self._directions:  # repeatedly: a released stream may overwrite a flag
            direction.let_go()

    # The end

    def part(self, deadline: float) -> None:
        """Wait until the queued work is done, since the peer may need it; at `deadline` release waiting streams."""
        while not self.is_over and time.monotonic() < deadline:
            time.sleep(1e-3)
        late = time.monotonic() + LOOK
        while not self.is_over and time.monotonic() < late:
            self._let_go("the group has ended")
            time.sleep(1e-3)

    def close(self) -> None:
        """Free everything. Call it only when `is_over`."""
        self.peer.give_up()
        self._close_directions()

    def _close_directions(self) -> None:
        outgoing, incoming = self.outgoing, self.incoming
        self.outgoing = self.incoming = None
        if self.is_broken:  # its memory cannot be freed before the process ends
            return
        if incoming is not None:
            incoming.close()
        if outgoing is not None:
            outgoing.close()
