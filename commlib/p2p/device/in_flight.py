"""Work in flight: the device work that one direction of a channel has queued and that has not finished."""

from __future__ import annotations

from collections import deque
from typing import Any

from commlib.devices.protocol import Device, DeviceEvent


class InFlight:
    """Events after the queued work of one direction, on any number of streams."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._events: deque[DeviceEvent] = deque()

    def note(self) -> None:
        """Track all work queued on the current stream so far."""
        events = self._events
        while events and events[0].done():
            events.popleft()
        self.add(self._device.current().record())

    def add(self, event: DeviceEvent, owner: Any = None) -> None:
        """Track the work before an event; keep `owner`, whose memory the work uses, alive until then."""
        self._events.append(_EventWithMemory(event, owner) if owner is not None else event)

    @property
    def pending(self) -> list[DeviceEvent]:
        """The events that are not done. Raises the device's error if it is lost."""
        return [event for event in list(self._events) if not event.done()]


class _EventWithMemory:
    """An event, with the memory that must stay alive until it."""

    def __init__(self, event: DeviceEvent, owner: Any) -> None:
        self._event, self._owner = event, owner

    def done(self) -> bool:
        return self._event.done()
