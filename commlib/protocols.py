"""Protocols that more than one layer needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class SharedMemory(Protocol):
    """Memory that every rank of a node maps. `bases[r]` is where rank r's part begins in THIS rank's address space."""

    @property
    def bases(self) -> Sequence[int]: ...

    @property
    def nbytes(self) -> int: ...

    def close(self) -> None:
        """Unmap it, or let who else holds it do so. Every rank closes its own, when it likes."""
        ...
