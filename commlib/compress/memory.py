"""Memory: allocate arrays on the device of one bucket, and copy small values between host and device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from commlib.devices.array import DeviceArray
from commlib.devices.host import HOST
from commlib.devices.protocol import Device
from commlib.devices.waiting import wait_for
from commlib.dtypes import Array
from commlib.kernels.protocol import Kernels

Watch = Callable[[str], Callable[[], None]]
"""Returns, for a text, a callback for use during a wait. The callback raises to end the wait."""


class Memory:
    """Allocates arrays of a device, and copies values between them and the host. On the host no copies are made.

    Copies are queued on the current stream. watch: the `watch` of the group over which the bucket is reduced.
    """

    __slots__ = ("_lent", "_watch", "device")

    def __init__(self, device: Device, watch: Watch) -> None:
        self.device, self._watch = device, watch
        self._lent: list[Array] = []  # host memory that queued copies may still read

    @property
    def kernels(self) -> Kernels:
        """The kernels for these arrays."""
        return self.device.kernels

    def empty(self, count: int, dtype: Any = np.float32) -> Any:
        """Return a new 1-D array."""
        if self.device is HOST:
            return np.empty(count, dtype)
        return self.device.wrap(self.device.empty((count,), dtype), "compression")

    def zeros(self, count: int, dtype: Any = np.float32) -> Any:
        """Return a new 1-D array of zeros. They are complete, so any stream may use the array."""
        if self.device is HOST:
            return np.zeros(count, dtype)
        array = self.empty(count, dtype)
        self.kernels.fill(array, 0)
        self.wait()
        return array

    def wait(self) -> None:
        """Wait until the work queued on the current stream is done."""
        if self.device is not HOST:
            wait_for(self.device.current().record(), self._watch(f"compression on {self.device.name}"))
            self._lent.clear()

    def on_host(self, *arrays: Any) -> list[Array]:
        """Return the values of contiguous arrays on the host: host arrays unchanged, completed copies of others."""
        if self.device is HOST:
            return list(arrays)
        copies = [self.device.staging(array.nbytes).view(array.dtype) for array in arrays]
        for copy, array in zip(copies, arrays, strict=True):
            self.device.copy(copy, array)
        self.wait()
        return copies

    def here(self, values: Array) -> Any:
        """Return host values (contiguous, 1-D) as an array on the device. The copy is queued."""
        if self.device is HOST:
            return values
        array = self.empty(len(values), values.dtype)
        self.put(array, values)
        return array

    def put(self, target: Any, values: Array) -> None:
        """Queue a copy of host values to an array of the same length and dtype."""
        if type(target) is not DeviceArray:
            if target is not values:
                target[:] = values
            return
        block: Array = self.device.staging(target.nbytes).view(target.dtype)
        block[:] = values
        self.device.copy(target, block)
        self._lent.append(block)
