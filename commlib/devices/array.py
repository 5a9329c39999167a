"""DeviceArray: an array in a device's memory as commlib handles it, whoever made it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np


class DeviceArray:
    """Contiguous memory with a shape and a dtype: as much of numpy's array as moving and combining data takes.

    What it does to data is queued on the device's current stream. owner: what keeps the memory alive, the user's array
    mostly. stream: on which the contents of a user's array come to be; None for memory that is commlib's own.
    """

    __slots__ = ("address", "device", "dtype", "owner", "shape", "stream")

    def __init__(
        self, device: Any, address: int, shape: tuple[int, ...], dtype: Any, owner: Any, stream: Any = None
    ) -> None:
        self.device, self.address, self.shape, self.dtype, self.owner = device, address, shape, np.dtype(dtype), owner
        self.stream = stream

    def __repr__(self) -> str:
        return f"<DeviceArray {self.shape} {self.dtype} on {self.device.name} at {self.address:#x}>"

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def itemsize(self) -> int:
        return int(self.dtype.itemsize)

    @property
    def nbytes(self) -> int:
        return self.size * self.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, key: slice) -> DeviceArray:
        """Return rows that follow each other."""
        start, stop, step = key.indices(self.shape[0])
        if step != 1:
            raise IndexError(f"rows of a DeviceArray are taken in steps of 1, not {step}")
        row = math.prod(self.shape[1:]) * self.itemsize
        return self._over(self.address + start * row, (max(stop - start, 0), *self.shape[1:]), self.dtype)

    def __setitem__(self, key: slice, value: Any) -> None:
        """Queue a copy of an array with as many bytes."""
        self.device.copy(self[key], value)

    def reshape(self, *shape: Any) -> DeviceArray:
        lengths = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple) else shape
        if lengths == (-1,):
            if len(self.shape) == 1:
                return self
            lengths = (self.size,)
        if math.prod(lengths) != self.size:
            raise ValueError(f"an array of shape {self.shape} cannot have the shape {lengths}")
        return self._over(self.address, lengths, self.dtype)

    def view(self, dtype: Any) -> DeviceArray:
        """Return the same bytes as a 1-D array of another dtype."""
        kind = np.dtype(dtype)
        return self._over(self.address, (self.nbytes // kind.itemsize,), kind)

    def copy(self) -> DeviceArray:
        """Queue a copy to new memory."""
        new = self.empty(self.shape, self.dtype)
        self.device.copy(new, self)
        return new

    def empty(self, shape: tuple[int, ...], dtype: Any) -> DeviceArray:
        """Return new memory of the same device."""
        device = self.device
        return device.wrap(device.empty(shape, dtype), "empty")  # type: ignore[no-any-return]

    def _over(self, address: int, shape: tuple[int, ...], dtype: Any) -> DeviceArray:
        return DeviceArray(self.device, address, shape, dtype, self.owner, self.stream)
