"""PeerProcess: check whether the process of the other side of a channel has ended, where this is visible."""

from __future__ import annotations

import os
import time

from commlib.buffers import shared_memory


class PeerProcess:
    """The other side's process, unknown until `meet`."""

    def __init__(self) -> None:
        self._number, self._met = 0, 0.0
        self._is_gone = False

    def meet(self, number: int) -> None:
        """Set its process id; 0 if the id has no meaning on this side."""
        self._number, self._met = number, time.time()

    def give_up(self) -> None:
        """Treat the process as gone if it is still unknown: no wait needs it any more."""
        self._is_gone = self._is_gone or not self._met

    @property
    def is_gone(self) -> bool:
        """Whether the process has ended."""
        if not self._is_gone and self._number not in (0, os.getpid()):
            self._is_gone = not shared_memory.may_own(self._number, self._met)
        return self._is_gone
