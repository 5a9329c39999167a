"""MessageCall: a compiled call that sends some or all of its data by messages."""

from __future__ import annotations

from functools import partial
from typing import Any

from commlib.collectives.paths import Move
from commlib.group.group import Group
from commlib.runtime.compiled_call import CompiledCall


class MessageCall(CompiledCall):
    """Run `move` as a call of a group, which compares it with the other ranks' calls when a check is due.

    flat: `move` gets the arrays as 1-D. must_match: see `Operation`.
    """

    __slots__ = ("_flat", "_group", "_move", "_must_match")

    def __init__(self, group: Group, text: str, move: Move, *, flat: bool = True, must_match: bool = False) -> None:
        super().__init__(group.progress, text)
        self._group, self._move, self._flat, self._must_match = group, move, flat, must_match

    def perform(self, x: Any, target: Any) -> Any:
        if self._flat:
            x, flat = x if x.ndim == 1 else x.reshape(-1), target if target.ndim == 1 else target.reshape(-1)
            value = self._group.calls.perform(self.text, self._move, x, flat, must_match=self._must_match)
        else:
            value = self._group.calls.perform(self.text, self._move, x, target, must_match=self._must_match)
        return target if value is None else value


class BlockingCall(CompiledCall):
    """A call that blocks inside MPI. Nothing can interrupt it, so it runs on the progress thread."""

    __slots__ = ("_call",)

    def __init__(self, group: Group, text: str, move: Move) -> None:
        super().__init__(group.progress, text)
        self._call = MessageCall(group, text, move, must_match=True)

    def now(self, x: Any, target: Any) -> Any:
        return self._progress.run_uninterrupted(self.text, partial(self.perform, x, target), x)

    def perform(self, x: Any, target: Any) -> Any:
        return self._call.perform(x, target)
