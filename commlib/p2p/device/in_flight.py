"""UnderWay: know what one direction of a channel has queued on streams of a device, and when all of that has run."""

from __future__ import annotations

from collections import deque
from typing import Any

from commlib.devices.protocol import Device, Event


class UnderWay:
    """See above. Messages may be queued on several streams."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._events: deque[Event] = deque()

    def note(self) -> None:
        """Remember what the current stream has been told so far."""
        events = self._events
        while events and events[0].done():
            events.popleft()
        self.add(self._device.current().record())

    def add(self, event: Event, kept: Any = None) -> None:
        """Remember what comes before an event, and keep what that uses."""
        self._events.append(_Keeping(event, kept) if kept is not None else event)

    @property
    def pending(self) -> list[Event]:
        """What has not run yet. Raises what the device raises if it is lost."""
        return [event for event in list(self._events) if not event.done()]


class _Keeping:
    """An event, and what must stay until it."""

    def __init__(self, event: Event, kept: Any) -> None:
        self._event, self._kept = event, kept

    def done(self) -> bool:
        return self._event.done()
