"""Claims: find calls that hold `Progress.running` without a record of it; recording would slow down small calls.

When a call from a signal handler wants `running`, the stack frames of its thread show whether that thread holds it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, TypeVar

# The code objects of methods that take `running`. They have the group's Progress in `self._progress`.
_CLAIMING: set[CodeType] = set()

Method = TypeVar("Method", bound=Callable[..., Any])


def mark_claiming(method: Method) -> Method:
    """Mark a method that takes `running`; this detects calls of a signal handler within the method."""
    _CLAIMING.add(method.__code__)
    return method


def is_claimed_here(progress: object) -> bool:
    """Return whether a call of this thread, other than the current one, holds `running` of a group's Progress."""
    calls = 0
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code in _CLAIMING:
            calls += frame.f_locals["self"]._progress is progress
        frame = frame.f_back
    return calls > 1  # one of them is the current call, which does not hold it
