"""Fetched: copy an array of a device to the host, and wait for that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from commlib.devices.array import DeviceArray
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
