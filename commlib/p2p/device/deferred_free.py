"""given_up: free memory that other processes may have open once they have closed it."""

from __future__ import annotations

import threading
from collections.abc import Callable

# What to free, and whether that may be. A finalizer may run in any thread, and within another.
_waiting: list[tuple[Callable[[], None], Callable[[], bool]]] = []
_lock = threading.RLock()


def give_up(free: Callable[[], None], is_unused: Callable[[], bool]) -> None:
    """Call `free` as soon as `is_unused`, now or when something else is given up or made."""
    with _lock:
        _waiting.append((free, is_unused))


def sweep() -> None:
    """Free what nobody has open any more."""
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
