"""Kept: keep memory alive that kernels use by its address, and let one piece take the place of another in order."""

from __future__ import annotations

from typing import Any


class Kept:
    """Keep such memory alive: memory in use, or soon in use, by another thread perhaps.

    Each change is one step that no thread and no signal handler can divide. Memory is added before kernels are told of
    it, with the number that it then has, and dropped when kernels use memory of a greater number.
    """

    def __init__(self) -> None:
        self._owners: dict[int, tuple[int, Any]] = {}  # by address

    def add(self, number: int, address: int, owner: Any) -> None:
        """Keep an owner of memory."""
        self._owners[address] = number, owner

    def drop(self, address: int) -> None:
        """Keep it no longer: kernels were not told of it."""
        self._owners.pop(address, None)

    def drop_before(self, number: int) -> None:
        """Keep none of smaller numbers."""
        for address, (known, _) in list(self._owners.items()):
            if known < number:
                self._owners.pop(address, None)

    def numbered(self, number: int) -> Any:
        """Return an owner of memory with this number, or None."""
        return next((owner for known, owner in list(self._owners.values()) if known == number), None)
