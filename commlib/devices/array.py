"""DeviceArray: commlib's view of an array in device memory, whichever library made it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np


class DeviceArray:
    """Contiguous device memory with a shape and a dtype, and the part of numpy's interface that commlib needs.

    Its copies are queued on the device's current stream. owner: keeps the memory alive, usually the user's array.
    stream: the stream that writes the contents of a user's array; None for memory of commlib.
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
        """Return consecutive rows."""
        start, stop, step = key.indices(self.shape[0])
        if step != 1:
            raise IndexError(f"a DeviceArray supports slices with step 1 only, got step {step}")
        row = math.prod(self.shape[1:]) * self.itemsize
        return self._over(self.address + start * row, (max(stop - start, 0), *self.shape[1:]), self.dtype)

    def __setitem__(self, key: slice, value: Any) -> None:
        """Queue a copy from an array with the same number of bytes."""
        self.device.copy(self[key], value)

    def reshape(self, *shape: Any) -> DeviceArray:
        lengths = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple) else shape
        if lengths == (-1,):
            if len(self.shape) == 1:
                return self
            lengths = (self.size,)
        if math.prod(lengths) != self.size:
            raise ValueError(f"cannot reshape an array of shape {self.shape} to {lengths}")
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
