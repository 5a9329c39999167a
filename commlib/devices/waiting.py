"""Wait in the host for what runs on a device."""

from __future__ import annotations

import time
from collections.abc import Callable

from commlib.devices.protocol import Event

# Seconds of polling without a nap, which lasts 50 us longer than it is asked to, and the first and the longest nap.
_EAGER, _NAP, _LONGEST_NAP = 300e-6, 20e-6, 1e-3


def wait_for(event: Event, on_wait: Callable[[], None]) -> None:
    """Block until an event is done, calling `on_wait` again and again, which may raise to give up."""
    if event.done():
        return
    eager, nap = time.monotonic() + _EAGER, _NAP
    while not event.done():
        on_wait()
        if time.monotonic() > eager:
            time.sleep(nap)
            nap = min(2 * nap, _LONGEST_NAP)
