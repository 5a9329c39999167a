"""Arrays: treat arrays of all devices alike. numpy's on the host, DeviceArray elsewhere."""

from __future__ import annotations

from typing import Any

import numpy as np

from commlib.buffers.views import address_of, as_host, contiguous, writable
from commlib.devices.array import DeviceArray
from commlib.devices.host import HOST
from commlib.devices.registry import lookup, named, refusal
from commlib.errors import UsageError


def device_of(x: Any) -> Any:
    """Return the device of an array: the host if no other one owns it."""
    if type(x) is np.ndarray:
        return HOST
    if type(x) is DeviceArray:
        return x.device
    found = lookup(x)
    return HOST if found is None else found


def name_of_device(array: Any) -> str:
    """Return the device's name for texts of calls; "" for the host."""
    return array.device.name if type(array) is DeviceArray else ""


def viewed(x: Any, verb: str, what: str = "x") -> Any:
    """Return a user's array over its own memory, contiguous or not on the host. Raises UsageError."""
    if type(x) is DeviceArray:
        return x
    found = None if isinstance(x, np.ndarray) else lookup(x)
    return as_host(x, verb, what) if found is None else found.wrap(x, verb, what)


def device_named(name: str, verb: str) -> Any:
    """Return this process' device of a kind, the host for "" and "cpu". Raises UsageError if it has none."""
    device = HOST if name in ("", "cpu") else named(name)
    if device is None:
        raise UsageError(f"{verb}: it wants a device of the kind {name!r}, which this rank has not: {refusal(name)}")
    return device


def readable(x: Any, verb: str, what: str = "x") -> Any:
    """Return a user's array as a numpy array or a DeviceArray, contiguous (a copy on the host only). UsageError."""
    array = viewed(x, verb, what)
    return array if type(array) is DeviceArray else contiguous(array, verb)


def written(x: Any, verb: str, what: str = "x") -> Any:
    """Return the same as `viewed`, to be written. Raises UsageError if it is read-only."""
    if type(x) is DeviceArray:
        return x
    found = None if isinstance(x, np.ndarray) else lookup(x)
    return writable(as_host(x, verb, what), verb, what) if found is None else found.wrap(x, verb, what, written=True)


def address(array: Any) -> int:
    """Return the address of an array's first element."""
    return array.address if type(array) is DeviceArray else address_of(array)


def overlap(a: Any, b: Any) -> bool:
    """Return whether two arrays may share memory."""
    if type(a) is DeviceArray or type(b) is DeviceArray:
        if not (type(a) is DeviceArray and type(b) is DeviceArray and a.device is b.device):
            return False
        return a.address < b.address + b.nbytes and b.address < a.address + a.nbytes
    return np.may_share_memory(a, b)


def is_contiguous(array: Any) -> bool:
    return type(array) is DeviceArray or bool(array.flags.c_contiguous)


def empty_like(array: Any, shape: int | tuple[int, ...], dtype: Any = None) -> Any:
    """Return new memory of the device of `array`."""
    kind = array.dtype if dtype is None else dtype
    if type(array) is DeviceArray:
        return array.empty((shape,) if isinstance(shape, int) else shape, kind)
    return np.empty(shape, kind)
