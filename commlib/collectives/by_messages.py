"""MessageCall: a compiled call whose data, or a part of it, goes by messages."""

from __future__ import annotations

from functools import partial
from typing import Any

from commlib.collectives.paths import Move
from commlib.group.group import Group
from commlib.runtime.compiled import Compiled


class MessageCall(Compiled):
    """What `move` does, as a call of a group: compared with the calls of the other ranks where that is due.

    flat: `move` is given the arrays as 1-D. blocks: it blocks in MPI, which nothing can interrupt, so it runs on the
    progress thread.
    """

    __slots__ = ("_blocks", "_flat", "_group", "_move")

    def __init__(self, group: Group, text: str, move: Move, *, flat: bool = True, blocks: bool = False) -> None:
        super().__init__(group.progress, text)
        self._group, self._move, self._flat, self._blocks = group, move, flat, blocks and group.size > 1

    def now(self, x: Any, target: Any) -> Any:
        if self._blocks:
            return self._progress.run_through(self.text, partial(self.perform, x, target), x)
        return super().now(x, target)

    def perform(self, x: Any, target: Any) -> Any:
        given = (x.reshape(-1), target.reshape(-1)) if self._flat else (x, target)
        value = self._group.perform_call(self.text, partial(self._move, *given), meets=self._blocks)
        return target if value is None else value
