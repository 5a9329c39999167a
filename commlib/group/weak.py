"""Weak: methods and parts of a group that do not keep their object alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import ParamSpec

from commlib.group.standing import Attached

P = ParamSpec("P")


def weakly(method: Callable[P, None]) -> Callable[P, None]:
    """Return a method without a reference to its object: once that is gone, a call does nothing."""
    weak = weakref.WeakMethod(method)

    def call(*args: P.args, **kwargs: P.kwargs) -> None:
        if (found := weak()) is not None:
            found(*args, **kwargs)

    return call


class WeakPart:
    """Lets a part that refers to its group end with it: see `standing.Attached`. Somebody else keeps the part."""

    def __init__(self, part: Attached) -> None:
        self._part = weakref.ref(part)

    def leave(self, reason: str) -> None:
        if (part := self._part()) is not None:
            part.leave(reason)

    def close(self) -> None:
        if (part := self._part()) is not None:
            part.close()

    def halt(self) -> None:
        if (part := self._part()) is not None:
            part.halt()
