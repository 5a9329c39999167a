"""DeviceWork: the handle of a call whose result is on a device."""

from __future__ import annotations

import time
from typing import Any

from commlib.devices.protocol import Device, DeviceEvent
from commlib.devices.waiting import wait_for
from commlib.errors import StallError
from commlib.runtime.work import Work


class DeviceWork(Work):
    """A call on device arrays. `done()` means that it has ended on the host; the device may still compute the result.

    `wait` blocks until the end on the host, and makes the current stream of the calling thread wait for the result:
    work that the thread queues afterwards sees it. `wait(host=True)` blocks until the result is in device memory.
    """

    __slots__ = ("_device", "event")

    def __init__(self, description: str, device: Device) -> None:
        super().__init__(description)
        self._device = device
        self.event: DeviceEvent | None = None  # recorded after the result; set before the work ends successfully

    def wait(self, timeout: float | None = None, *, host: bool = False) -> Any:
        """Wait for the call, as `Work.wait` does. host: also block until the result is in device memory."""
        started = time.monotonic()
        result = super().wait(timeout)
        if self.event is not None:
            self._device.current().wait(self.event)
        if host and self.event is not None:

            def on_wait() -> None:
                if timeout is not None and time.monotonic() - started > timeout:
                    raise StallError(
                        f"{self.description}: the device did not finish the result in {timeout} s; wait again for it"
                    )

            wait_for(self.event, on_wait)
        return result
