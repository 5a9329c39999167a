"""Wait on the host for work on a device."""

from __future__ import annotations

import time
from collections.abc import Callable

from commlib.devices.protocol import DeviceEvent

# Seconds of polling without naps (a nap takes 50 us longer than requested), then the first and the longest nap.
_EAGER, _NAP, _LONGEST_NAP = 300e-6, 20e-6, 1e-3


def wait_for(event: DeviceEvent, on_wait: Callable[[], None]) -> None:
    """Block until an event is done. Call `on_wait` repeatedly; it may raise to end the wait."""
    if event.done():
        return
    eager, nap = time.monotonic() + _EAGER, _NAP
    while not event.done():
        on_wait()
        if time.monotonic() > eager:
            time.sleep(nap)
            nap = min(2 * nap, _LONGEST_NAP)
