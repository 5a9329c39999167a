"""Copies: of an array of a device on the host, and of one of the host on a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from commlib.devices.array import DeviceArray
from commlib.devices.host import HOST
from commlib.devices.protocol import Device
from commlib.devices.waiting import wait_for
from commlib.dtypes import Array


def fetched(array: Any, on_wait: Callable[[], None]) -> Array:
    """Return the values of a DeviceArray, behind what the current stream was told; an array of the host as it is.

    on_wait: see `wait_for`.
    """
    if not isinstance(array, DeviceArray):
        return np.asarray(array)
    here: Array = array.device.staging(array.nbytes).view(array.dtype)
    array.device.copy(here, array)
    wait_for(array.device.current().record(), on_wait)
    return here.reshape(array.shape)


def brought(array: Any, device: Device) -> Any:
    """Return an array that is on a device: itself, or of the host's a copy, which the current stream has queued."""
    if device is HOST or type(array) is DeviceArray:
        return array
    block = device.staging(array.nbytes).view(array.dtype).reshape(array.shape)
    block[...] = array
    made = device.wrap(device.empty(array.shape, array.dtype), "a copy")
    device.copy(made, block)
    return made
