"""Registry: find the device that owns an array, by the array types that devices register."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from typing import Any

# Filled by `register` when a device is first used.
_OWNERS: dict[type, Callable[[Any], Any]] = {}
_NAMED: dict[str, Callable[[], Any]] = {}


def register(name: str, kind: type, device_of: Callable[[Any], Any], device: Callable[[], Any]) -> None:
    """Register a device as the owner of an array type.

    device_of: returns the device of such an array, or None if the array is on the host. device: returns the device that
    this process uses, for arrays from other ranks.
    """
    _OWNERS[kind], _NAMED[name] = device_of, device


def lookup(x: Any) -> Any:
    """Return the device that owns an array; None if the array is on the host."""
    kind = type(x)
    for base in kind.__mro__ if _OWNERS else ():
        if (device_of := _OWNERS.get(base)) is not None:
            return device_of(x)
    if hasattr(kind, "__cuda_array_interface__") or hasattr(kind, "__dlpack_device__"):
        return _cuda().device_of(x)
    return None


def find_named(name: str) -> Any:
    """Return this process' device of a kind, or None if it has none."""
    if name == "cuda":
        return _cuda().device_or_none()
    device = _NAMED.get(name)
    return None if device is None else device()


def refusal(name: str) -> str:
    """Return why this process has no device of a kind."""
    return _cuda().refusal() if name == "cuda" else f"{name!r} is not a registered kind of device"


def streams() -> dict[str, Any]:
    """Return this thread's current stream on each device that this process has used, by the device's name."""
    result = {name: device.current() for name, find in _NAMED.items() if (device := find()) is not None}
    if "commlib.devices.cuda.process" in sys.modules and (gpu := _cuda().find_used()) is not None:
        result[gpu.name] = gpu.current()
    return result


@cache
def _cuda() -> Any:
    from commlib.devices.cuda import process  # only once an array may be on a GPU

    return process
