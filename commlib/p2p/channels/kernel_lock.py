"""Kernel lock: exclude compiled functions from an end while Python works on it."""

from __future__ import annotations

import time
from types import TracebackType

from commlib.kernels.host.channel import let_go
from commlib.kernels.host.network_channel import take_turn
from commlib.kernels.host.node import entry_point

_take_turn, _let_go = entry_point(take_turn), entry_point(let_go)

_NAP = 20e-6  # seconds: about as long as a compiled function holds the lock


class KernelLock:
    """A lock between Python and compiled functions, in the fields of the end at an address.

    Only the holder of the end's Python lock takes it; signal handlers may take it again. If an exception interrupts
    this, compiled functions may leave the end to Python from then on, but no call hangs.
    """

    __slots__ = ("_at", "_depth")

    def __init__(self, at: int) -> None:
        self._at, self._depth = at, 0

    def __enter__(self) -> None:
        while not _take_turn(self._at):
            time.sleep(_NAP)
        self._depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._depth -= 1
        if self._depth <= 0:
            _let_go(self._at)
