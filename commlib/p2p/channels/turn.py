"""Turn: take an end from compiled functions while Python looks at it."""

from __future__ import annotations

import time
from types import TracebackType

from commlib.kernels.host.channel import let_go
from commlib.kernels.host.node import entry_point
from commlib.kernels.host.posted import take_turn

_take_turn, _let_go = entry_point(take_turn), entry_point(let_go)

_NAP = 20e-6  # seconds: a compiled function has it for as long


class Turn:
    """Take Python's turn at the end at an address. The holder of that end's lock takes it, again in signal handlers.

    Where an exception comes in between, compiled functions may leave the end to Python from then on; nothing waits.
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
