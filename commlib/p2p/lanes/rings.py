"""Shared-memory rings that a rank sends with, kept until their receivers map them. See `kernels.host.shm_ring`."""

from __future__ import annotations

import numpy as np

from commlib.buffers.peer_memory import PeerMemory
from commlib.kernels.fields import shm_ring as kernels


class ShmRing:
    """A ring of `units` in memory that another process can map. Raises TransportError if there is not enough memory.

    number: its number in the lane, from 1.
    """

    def __init__(self, number: int, units: int, *, is_named: bool) -> None:
        self.number, self.units = number, units
        self.peer_memory = PeerMemory(kernels.RING_AT + units * kernels.UNIT, is_named=is_named)
        self.address = self.peer_memory.memory.address
        self._opened_flag = self.peer_memory.memory.array(kernels.OPENED_AT, 8).view(np.int64)

    @property
    def is_found(self) -> bool:
        """Whether the receiver has mapped the ring."""
        return bool(self._opened_flag[0])


class RingRegistry:
    """The rings that no receiver has mapped yet. Their messages can be received even after the sender has left."""

    def __init__(self) -> None:
        self._unfound: dict[ShmRing, None] = {}

    def make(self, number: int, units: int, *, is_named: bool) -> ShmRing:
        """Return a new ring."""
        self.sweep()
        ring = ShmRing(number, units, is_named=is_named)
        self._unfound[ring] = None
        return ring

    def sweep(self) -> None:
        """Withdraw the names of mapped rings."""
        for ring in [ring for ring in list(self._unfound) if ring.is_found]:
            self.drop(ring)

    def drop(self, ring: ShmRing) -> None:
        """Withdraw a ring. Idempotent."""
        ring.peer_memory.withdraw()
        self._unfound.pop(ring, None)

    def close(self) -> None:
        """Withdraw all rings."""
        for ring in list(self._unfound):
            self.drop(ring)
