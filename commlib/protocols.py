"""Protocols that more than one layer needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class SharedMemory(Protocol):
    """Memory that every rank of a node maps. `bases[r]` is the address of rank r's segment in THIS rank's process."""

    @property
    def bases(self) -> Sequence[int]: ...

    @property
    def nbytes(self) -> int: ...

    def close(self) -> None:
        """Unmap the memory, or leave that to another holder. Not collective: every rank closes its own mapping."""
        ...
