"""Keep-alive: own memory that kernels use by address, and replace it safely by newer memory."""

from __future__ import annotations

from typing import Any


class KeepAlive:
    """The owners of memory that kernels use, or will use, perhaps in another thread.

    Each change is one atomic step for threads and signal handlers. Memory is added with its number before kernels get
    its address, and dropped when the kernels use memory of a larger number.
    """

    def __init__(self) -> None:
        self._owners: dict[int, tuple[int, Any]] = {}  # by address

    def add(self, number: int, address: int, owner: Any) -> None:
        """Keep the owner of some memory alive."""
        self._owners[address] = number, owner

    def drop(self, address: int) -> None:
        """Drop memory whose address kernels never got."""
        self._owners.pop(address, None)

    def drop_before(self, number: int) -> None:
        """Drop all memory of smaller numbers."""
        for address, (last_number, _) in list(self._owners.items()):
            if last_number < number:
                self._owners.pop(address, None)

    def numbered(self, number: int) -> Any:
        """Return an owner of memory with this number, or None."""
        return next((owner for last_number, owner in list(self._owners.values()) if last_number == number), None)
