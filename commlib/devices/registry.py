"""Registry: find the device that owns an array. A device says which types it knows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# Filled where a device is first used; nothing else in the process depends on it.
_OWNERS: dict[type, Callable[[Any], Any]] = {}
_NAMED: dict[str, Callable[[], Any]] = {}


def register(name: str, kind: type, device_of: Callable[[Any], Any], device: Callable[[], Any]) -> None:
    """Let a device own arrays of a type.

    device_of: returns the device of such an array, or None if it is on the host after all. device: returns the one
    that this process uses, for arrays that come from a rank which has one.
    """
    _OWNERS[kind], _NAMED[name] = device_of, device


def lookup(x: Any) -> Any:
    """Return the device that owns an array; None if it is on the host."""
    if not _OWNERS:  # most processes have no other device, and calls on the host's arrays come here
        return None
    for kind in type(x).__mro__:
        if (device_of := _OWNERS.get(kind)) is not None:
            return device_of(x)
    return None


def named(name: str) -> Any:
    """Return this process' device of a kind, or None if it has none."""
    device = _NAMED.get(name)
    return None if device is None else device()


def streams() -> dict[str, Any]:
    """Return this thread's current stream on each device of this process, by the device's name."""
    return {name: device.current() for name, find in _NAMED.items() if (device := find()) is not None}
