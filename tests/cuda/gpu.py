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
        """Return the values of an array once the work queued on this thread's stream has ended."""
        wrapped = self.device.wrap(array, "fetch")
        block = self.device.staging(wrapped.nbytes)
        self.device.copy(block, wrapped)
        self.cupy.cuda.get_current_stream().synchronize()
        values: Array = block.view(wrapped.dtype).reshape(wrapped.shape).copy()
        return values

    def fill(self, array: Any, value: int) -> None:
        """Queue writing a number to all elements."""
        self.device.kernels.fill(self.device.wrap(array, "fill").reshape(-1), value)


def gpu() -> Gpu:
    """Return the GPU of this process, or else the stand-in."""
    import importlib

    try:
        cupy = importlib.import_module("cupy")
        has_gpu = bool(cupy.cuda.runtime.getDeviceCount())
    except Exception:  # not installed, or without a driver
        has_gpu = False
    if not has_gpu:
        cupy = standin.install()
    return Gpu(device(), cupy)
