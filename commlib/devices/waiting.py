"""Wait in the host for what runs on a device."""

from __future__ import annotations

import time
from collections.abc import Callable

from commlib.devices.protocol import Event

# Polls without a nap, and the first and the longest nap in seconds.
_EAGER, _NAP, _LONGEST_NAP = 20, 20e-6, 1e-3


def wait_for(event: Event, on_wait: Callable[[], None]) -> None:
    """Block until an event is done, calling `on_wait` again and again, which may raise to give up."""
    polls, nap = 0, _NAP
    while not event.done():
        on_wait()
        polls += 1
        if polls > _EAGER:
            time.sleep(nap)
            nap = min(2 * nap, _LONGEST_NAP)
