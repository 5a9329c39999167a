"""Deferred free: free memory shared with other processes once they have closed it."""

from __future__ import annotations

import threading
from collections.abc import Callable

# (free function, is-unused function). A finalizer may run in any thread, and inside another finalizer.
_waiting: list[tuple[Callable[[], None], Callable[[], bool]]] = []
_lock = threading.RLock()


def defer_free(free: Callable[[], None], is_unused: Callable[[], bool]) -> None:
    """Call `free` as soon as `is_unused` returns True: now, or in a later call of this module."""
    with _lock:
        _waiting.append((free, is_unused))


def sweep() -> None:
    """Free all memory that no process has open any more."""
    with _lock:
        found, _waiting[:] = _waiting[:], []
    kept = []
    for pair in found:
        if pair[1]():
            pair[0]()
        else:
            kept.append(pair)
    with _lock:
        _waiting.extend(kept)
