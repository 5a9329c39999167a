"""Copies: copy device arrays to the host, and host arrays to a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from commlib.devices.array import DeviceArray
from commlib.devices.host import HOST
from commlib.devices.protocol import Device
from commlib.devices.waiting import wait_for
from commlib.dtypes import Array


def copy_to_host(array: Any, on_wait: Callable[[], None]) -> Array:
    """Return a host copy of a DeviceArray, after the current stream's earlier work; return a host array unchanged.

    on_wait: see `wait_for`.
    """
    if not isinstance(array, DeviceArray):
        return np.asarray(array)
    here: Array = array.device.staging(array.nbytes).view(array.dtype)
    array.device.copy(here, array)
    wait_for(array.device.current().record(), on_wait)
    return here.reshape(array.shape)


def copy_to_device(array: Any, device: Device) -> Any:
    """Return a device array unchanged, or a device copy of a host array, queued on the current stream."""
    if device is HOST or type(array) is DeviceArray:
        return array
    block = device.staging(array.nbytes).view(array.dtype).reshape(array.shape)
    block[...] = array
    target = device.wrap(device.empty(array.shape, array.dtype), "a copy")
    device.copy(target, block)
    return target
