"""Rings: keep the rings that a rank made for what it sends, until receivers find them. See `kernels.host.lane`."""

from __future__ import annotations

import numpy as np

from commlib.buffers.peer_memory import PeerMemory
from commlib.kernels.host import lane as kernels


class Ring:
    """Memory of `units` for messages, which another process can map. Raises TransportError if there is not so much.

    number: which one of its lane it is to be, from 1.
    """

    def __init__(self, number: int, units: int, *, is_named: bool) -> None:
        self.number, self.units = number, units
        self.made = PeerMemory(kernels.RING_AT + units * kernels.UNIT, is_named=is_named)
        self.address = self.made.memory.address
        self._found = self.made.memory.array(kernels.FOUND_AT, 8).view(np.int64)

    @property
    def is_found(self) -> bool:
        """Whether its receiver has mapped it."""
        return bool(self._found[0])


class Rings:
    """Keep rings that no receiver has found yet: their messages can still be received after the sender has left."""

    def __init__(self) -> None:
        self._unfound: dict[Ring, None] = {}

    def make(self, number: int, units: int, *, is_named: bool) -> Ring:
        """Return a new one."""
        self.sweep()
        ring = Ring(number, units, is_named=is_named)
        self._unfound[ring] = None
        return ring

    def sweep(self) -> None:
        """Withdraw rings that have been found."""
        for ring in [ring for ring in list(self._unfound) if ring.is_found]:
            self.drop(ring)

    def drop(self, ring: Ring) -> None:
        """Withdraw a ring. Idempotent."""
        ring.made.withdraw()
        self._unfound.pop(ring, None)

    def close(self) -> None:
        """Withdraw all rings."""
        for ring in list(self._unfound):
            self.drop(ring)
