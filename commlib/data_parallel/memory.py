"""BucketMemory: allocate the memory of one bucket, on the device of its gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from commlib.data_parallel.buckets import Bucket
from commlib.devices.array import DeviceArray
from commlib.devices.arrays import device_named
from commlib.devices.host import HOST
from commlib.devices.protocol import Device
from commlib.devices.waiting import wait_for
from commlib.dtypes import Array, numpy_dtype

Empty = Callable[..., Any]


class BucketMemory:
    """A bucket's array, and a host copy of its "used" flags.

    empty: allocates zeroed symmetric memory (`Communicator.empty`). `array` is a numpy array or a DeviceArray.
    """

    __slots__ = ("_flags", "array", "bucket", "device", "symmetric")

    def __init__(self, bucket: Bucket, empty: Empty) -> None:
        self.bucket = bucket
        self.device: Device = device_named(bucket.device, "a bucket")
        if self.device is HOST:
            self.symmetric = empty((bucket.count,), bucket.dtype)
        else:
            array = empty((bucket.count,), bucket.dtype, device=self.device)
            self.symmetric = self.device.wrap(array, "a bucket")
        self.array = self.symmetric
        self._flags: Array | None = None

    def move(self, *, aside: bool) -> None:
        """Switch to zeroed private memory of this rank, or back to the symmetric memory."""
        self.array = self._zeros() if aside else self.symmetric

    def _zeros(self) -> Any:
        if self.device is HOST:
            return np.zeros_like(self.symmetric)
        zeros = self.symmetric.empty(self.symmetric.shape, self.symmetric.dtype)
        self.device.kernels.fill(zeros, 0)
        return zeros

    def fill(self, start: int, stop: int, value: int) -> None:
        """Set these elements to a number."""
        part = self.array[start:stop]
        if type(part) is DeviceArray:
            self.device.kernels.fill(part, value)
        else:
            part[...] = value
        self._flags = None

    def write(self, start: int, count: int, address: int) -> None:
        """Queue a copy of `count` elements from a device address to the elements from `start` on."""
        kind = numpy_dtype(self.bucket.dtype)
        self.array[start : start + count] = DeviceArray(self.device, address, (count,), kind, None)

    def scale(self, factor: float) -> None:
        """Multiply the gradients by a factor."""
        if factor != 1:
            self.device.kernels.scale(self.array[: self.bucket.flags], factor)

    def forget_flags(self) -> None:
        """Drop the host copy of the flags, because a reduction has written new ones."""
        self._flags = None

    def is_set(self, flag: int, watch: Callable[[str], Callable[[], None]]) -> bool:
        """Return whether a flag is above zero. The first call after a reduction waits for the device."""
        if type(self.array) is not DeviceArray:
            return bool(self.array[flag] > 0)
        if self._flags is None:
            there = self.array[self.bucket.flags : self.bucket.flags + len(self.bucket.slots)]
            self._flags = self.device.staging(there.nbytes).view(there.dtype)
            self.device.copy(self._flags, there)
            wait_for(self.device.current().record(), watch(f"flags of bucket {self.bucket.index}"))
        return bool(self._flags[flag - self.bucket.flags] > 0)
