"""Gpu: this process' GPU as test bodies use it, or CuPy's stand-in where there is none."""

from __future__ import annotations

from typing import Any

import numpy as np

from commlib.devices.cuda.device import CudaDevice
from commlib.devices.cuda.process import device
from commlib.dtypes import Array
from tests.cuda import standin


class Gpu:
    """See above. kind: the type of its arrays."""

    def __init__(self, device: CudaDevice, cupy: Any) -> None:
        self.device, self.cupy, self.kind = device, cupy, cupy.ndarray
        self.is_real = not getattr(cupy, "is_stand_in", False)

    def put(self, values: Any) -> Any:
        """Return a copy of host values, which may be changed at once."""
        values = np.array(values, copy=True, order="C")
        array, block = self.device.empty(values.shape, values.dtype), self.device.staging(values.nbytes)
        block[:] = values.reshape(-1).view(np.uint8)
        self.device.copy(self.device.wrap(array, "put"), block)
        return array

    def fetch(self, array: Any) -> Array:
        """Return the values of an array, when what this thread's stream has been told so far is done."""
        there = self.device.wrap(array, "fetch")
        block = self.device.staging(there.nbytes)
        self.device.copy(block, there)
        self.cupy.cuda.get_current_stream().synchronize()
        values: Array = block.view(there.dtype).reshape(there.shape).copy()
        return values

    def fill(self, array: Any, value: int) -> None:
        """Queue writing a number to all elements."""
        self.device.kernels.fill(self.device.wrap(array, "fill").reshape(-1), value)


def gpu() -> Gpu:
    """Return the GPU of this process, or else the stand-in."""
    import importlib

    try:
        cupy = importlib.import_module("cupy")
        found = bool(cupy.cuda.runtime.getDeviceCount())
    except Exception:  # not installed, or without a driver
        found = False
    if not found:
        cupy = standin.install()
    return Gpu(device(), cupy)
