"""Memory of the late device: addresses, poison, and freed memory."""

from __future__ import annotations

from typing import Any

from commlib.buffers.views import address_of
from commlib.devices.array import DeviceArray
from commlib.dtypes import FLOATS, Array, name_of

Place = tuple[int, int, int]
"""Memory: its address, its bytes, and the byte that is poison there."""


def poison_of(dtype: Any) -> int:
    return 0xFF if name_of(dtype) in (*FLOATS, "complex64", "complex128") else 0xA5


def place_of(array: Any) -> Place:
    at = array.address if isinstance(array, DeviceArray) else address_of(array)
    return at, array.nbytes, poison_of(array.dtype)


def overlap(a: Place, b: Place) -> bool:
    return a[0] < b[0] + b[1] and b[0] < a[0] + a[1]


class _Part:
    def __init__(self, address: int, memory: Any) -> None:
        self.address, self.memory = address, memory


class Reached:
    """Host memory that the device and other ranks can address. `parts` are those of the ranks."""

    def __init__(self, memory: Any) -> None:
        self.bases, self.nbytes, self._memory = memory.bases, memory.nbytes, memory
        self.parts = [_Part(base, memory) for base in memory.bases]

    def close(self) -> None:
        self._memory.close()


class Owner:
    """The owner of memory; its end frees it."""


class Release:
    """Poison freed memory, in the stream's order."""

    def __init__(self, pool: Array, poison: int) -> None:
        self._pool, self._poison = pool, poison

    def __call__(self) -> None:
        self._pool.fill(self._poison)
        _graveyard.append(self._pool)  # a late write hits nothing else
        del _graveyard[:-1000]


_graveyard: list[Array] = []
