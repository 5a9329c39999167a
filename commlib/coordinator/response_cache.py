"""ResponseCache: assign a bit to each agreed operation, by which ranks submit it again. [pure]

All ranks see the same agreements in the same order, so they assign, keep and free the same bits without communication.
"""

from __future__ import annotations

import heapq

from commlib.coordinator.op_request import OpRequest


class ResponseCache:
    """Up to `capacity` requests by name and by bit. The oldest full announcement is evicted first."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._bits: dict[str, int] = {}  # in the order of full announcements
        self._requests: dict[int, OpRequest] = {}
        self._free: list[int] = []
        self.highest = 0
        """One more than the highest bit assigned so far."""
        self.all_bits = 0
        """The mask of bits in use."""

    def __len__(self) -> int:
        return len(self._bits)

    def __contains__(self, name: str) -> bool:
        return name in self._bits

    def bit(self, request: OpRequest) -> int | None:
        """Return the bit of this exact request, or None."""
        bit = self._bits.get(request.name)
        if bit is None:
            return None
        known = self._requests[bit]
        return bit if known is request or known == request else None

    @property
    def is_full(self) -> bool:
        """Whether another name needs one of these names' places."""
        return len(self._bits) >= self._capacity

    @property
    def oldest(self) -> str:
        """The name that was announced in full longest ago."""
        return next(iter(self._bits))

    def add(self, request: OpRequest) -> int:
        """Assign the lowest free bit to a request, and return it."""
        if self._free:
            bit = heapq.heappop(self._free)
        else:
            bit, self.highest = self.highest, self.highest + 1
        self._bits[request.name] = bit
        self._requests[bit] = request
        self.all_bits |= 1 << bit
        return bit

    def remove(self, name: str) -> int:
        """Remove a name; return its bit."""
        bit = self._bits.pop(name)
        del self._requests[bit]
        self.all_bits &= ~(1 << bit)
        heapq.heappush(self._free, bit)
        return bit
