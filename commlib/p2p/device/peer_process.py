"""PeerProcess: tell whether the process at the other side of a channel is gone, where that can be seen."""

from __future__ import annotations

import os
import time

from commlib.buffers import shared_memory


class PeerProcess:
    """See above. Nothing is known of it until it is met."""

    def __init__(self) -> None:
        self._number, self._met = 0, 0.0
        self._is_gone = False

    def meet(self, number: int) -> None:
        """Note its number; 0 where that says nothing here."""
        self._number, self._met = number, time.time()

    def give_up(self) -> None:
        """Take it for gone if it has not been met, because nobody waits for it any more."""
        self._is_gone = self._is_gone or not self._met

    @property
    def is_gone(self) -> bool:
        """Whether it is gone."""
        if not self._is_gone and self._number not in (0, os.getpid()):
            self._is_gone = not shared_memory.may_own(self._number, self._met)
        return self._is_gone
