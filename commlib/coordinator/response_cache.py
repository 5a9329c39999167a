"""Response cache: give each operation that was agreed on a bit, by which ranks ask for it again. [pure]

All ranks see the same agreements in the same order, so they give out, keep and take back the same bits without a word.
"""

from __future__ import annotations

import heapq

from commlib.coordinator.request import Request


class ResponseCache:
    """Up to `capacity` requests by name and by bit; the name that was told longest ago goes first."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._bits: dict[str, int] = {}  # in the order in which they were told
        self._requests: dict[int, Request] = {}
        self._free: list[int] = []
        self.highest = 0
        """More than the highest bit that was ever given out."""
        self.all_bits = 0
        """The bits that are in use, as a number."""

    def __len__(self) -> int:
        return len(self._bits)

    def __contains__(self, name: str) -> bool:
        return name in self._bits

    def bit(self, request: Request) -> int | None:
        """Return the bit that stands for this very request, or None."""
        bit = self._bits.get(request.name)
        if bit is None:
            return None
        known = self._requests[bit]
        return bit if known is request or known == request else None

    @property
    def is_full(self) -> bool:
        """Whether another name needs the place of one of these."""
        return len(self._bits) >= self._capacity

    @property
    def oldest(self) -> str:
        """The name that was told longest ago."""
        return next(iter(self._bits))

    def add(self, request: Request) -> int:
        """Give a request a bit, the lowest that is free, and return it."""
        if self._free:
            bit = heapq.heappop(self._free)
        else:
            bit, self.highest = self.highest, self.highest + 1
        self._bits[request.name] = bit
        self._requests[bit] = request
        self.all_bits |= 1 << bit
        return bit

    def remove(self, name: str) -> int:
        """Forget a name; return the bit it had."""
        bit = self._bits.pop(name)
        del self._requests[bit]
        self.all_bits &= ~(1 << bit)
        heapq.heappush(self._free, bit)
        return bit
