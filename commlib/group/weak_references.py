"""Weak references: methods and parts of a group that do not keep their object alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import ParamSpec

from commlib.group.group_status import GroupPart

P = ParamSpec("P")


def make_weak_method(method: Callable[P, None]) -> Callable[P, None]:
    """Return a method that holds only a weak reference to its object; once the object is freed, calls do nothing."""
    weak = weakref.WeakMethod(method)

    def call(*args: P.args, **kwargs: P.kwargs) -> None:
        if (method := weak()) is not None:
            method(*args, **kwargs)

    return call


class WeakPart:
    """A weak reference to a part that ends with its group (`GroupPart`); another owner keeps the part alive."""

    def __init__(self, part: GroupPart) -> None:
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
