"""Polling: poll until an operation is done: at first without pause, then yielding the core, then with naps."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from commlib.transport.base import WaitHook
from commlib.transport.naps import nap_seconds

# The number of polls without pause; then the seconds of polls that yield the core, in the main thread and in other
# threads (the main thread may need their core and the interpreter).
EAGER, _YIELDING, _YIELDING_ASIDE = 20, 20e-3, 0.5e-3

_LOOK = 0.02  # seconds between calls of `on_wait`


def poll(done: Callable[[], bool], on_wait: WaitHook) -> None:
    """Poll until `done` returns True, calling `on_wait` repeatedly; an exception from either ends the wait."""
    for _ in range(EAGER):
        if done():
            return
    main = threading.current_thread() is threading.main_thread()
    now = start = time.monotonic()
    looked, patient = now, now + (_YIELDING if main else _YIELDING_ASIDE)
    while not done():
        if now < patient:
            os.sched_yield()
        else:
            time.sleep(nap_seconds(now - start))
        now = time.monotonic()
        if now - looked > _LOOK:
            on_wait()
            looked = now
