"""DeviceWork: follow a call that has its result on a device."""

from __future__ import annotations

import time
from typing import Any

from commlib.devices.protocol import Device, Event
from commlib.devices.waiting import wait_for
from commlib.errors import StallError
from commlib.runtime.work import Work


class DeviceWork(Work):
    """A call that has ended on the host when `done()` says so, though its result may still be on its way.

    `wait` blocks until then, and lets the current stream of its thread wait for the result: what that thread queues
    afterwards sees it. `wait(host=True)` blocks until the result is there.
    """

    __slots__ = ("_device", "event")

    def __init__(self, description: str, device: Device) -> None:
        super().__init__(description)
        self._device = device
        self.event: Event | None = None  # when the result is there; set before the work ends well

    def wait(self, timeout: float | None = None, *, host: bool = False) -> Any:
        """See above; otherwise `Work.wait`."""
        started = time.monotonic()
        result = super().wait(timeout)
        if self.event is not None:
            self._device.current().wait(self.event)
        if host and self.event is not None:

            def on_wait() -> None:
                if timeout is not None and time.monotonic() - started > timeout:
                    raise StallError(
                        f"{self.description}: its result was not on the device after {timeout} s; wait again for it"
                    )

            wait_for(self.event, on_wait)
        return result
