"""Arrays: the same functions for arrays of all devices, numpy arrays on the host and DeviceArray elsewhere."""

from __future__ import annotations

from typing import Any

import numpy as np

from commlib.buffers.views import address_of, as_host, contiguous, writable
from commlib.devices.array import DeviceArray
from commlib.devices.host import HOST
from commlib.devices.registry import find_named, lookup, refusal
from commlib.errors import UsageError


def device_of(x: Any) -> Any:
    """Return the device of an array: the host if no other device owns it."""
    if type(x) is np.ndarray:
        return HOST
    if type(x) is DeviceArray:
        return x.device
    device = lookup(x)
    return HOST if device is None else device


def name_of_device(array: Any) -> str:
    """Return the device's name for call texts; "" for the host."""
    return array.device.name if type(array) is DeviceArray else ""


def as_view(x: Any, verb: str, what: str = "x") -> Any:
    """Return a user's array without a copy. A host array may be non-contiguous. Raises UsageError."""
    if type(x) is DeviceArray:
        return x
    device = None if isinstance(x, np.ndarray) else lookup(x)
    return as_host(x, verb, what) if device is None else device.wrap(x, verb, what)


def device_named(name: str, verb: str) -> Any:
    """Return this process' device of a kind, the host for "" and "cpu". Raises UsageError if it has none."""
    device = HOST if name in ("", "cpu") else find_named(name)
    if device is None:
        raise UsageError(f"{verb}: it needs a device of kind {name!r}, but this rank has none: {refusal(name)}")
    return device


def as_contiguous(x: Any, verb: str, what: str = "x") -> Any:
    """Return a user's array as a contiguous numpy array (perhaps a copy) or DeviceArray. Raises UsageError."""
    array = as_view(x, verb, what)
    return array if type(array) is DeviceArray else contiguous(array, verb)


def as_writable(x: Any, verb: str, what: str = "x") -> Any:
    """Return a user's array to write to, without a copy. Raises UsageError if it is read-only."""
    if type(x) is DeviceArray:
        return x
    device = None if isinstance(x, np.ndarray) else lookup(x)
    return writable(as_host(x, verb, what), verb, what) if device is None else device.wrap(x, verb, what, written=True)


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
    """Return a new, uninitialised array on the device of `array`."""
    kind = array.dtype if dtype is None else dtype
    if type(array) is DeviceArray:
        return array.empty((shape,) if isinstance(shape, int) else shape, kind)
    return np.empty(shape, kind)
