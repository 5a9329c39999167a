"""Polling: ask until something is done, first at once, then giving the core away, then with short sleeps."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from commlib.transport.base import WaitHook

# How often it asks at once; then for how many seconds it asks giving the core away, in the main thread and in others,
# whose core and interpreter the main thread may want; and how long it then sleeps between.
EAGER, _YIELDING, _YIELDING_ASIDE, _NAP = 20, 20e-3, 0.5e-3, 50e-6

_LOOK = 0.02  # seconds between calls of `on_wait`


def poll(done: Callable[[], bool], on_wait: WaitHook) -> None:
    """Ask until it is `done`, calling `on_wait` now and then; whatever that raises ends the wait."""
    for _ in range(EAGER):
        if done():
            return
    main = threading.current_thread() is threading.main_thread()
    now = time.monotonic()
    looked, patient = now, now + (_YIELDING if main else _YIELDING_ASIDE)
    while not done():
        if now < patient:
            os.sched_yield()
        else:
            time.sleep(_NAP)
        now = time.monotonic()
        if now - looked > _LOOK:
            on_wait()
            looked = now
