"""Claims: find calls that have taken `Progress.running` without a note of it, as a small call has no time for one.

They are found by the frames of their thread, where a call of a signal handler asks for its own turn.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, TypeVar

# The code of methods that claim. They have the group's Progress in `self._progress`, and may have a local `step`, None
# where they leave it to another of them.
_CLAIMING: set[CodeType] = set()

Method = TypeVar("Method", bound=Callable[..., Any])


def claiming(method: Method) -> Method:
    """Mark a method that takes `running`, so that a signal handler's call within it can be told from others."""
    _CLAIMING.add(method.__code__)
    return method


def is_claimed_here(progress: object) -> bool:
    """Return whether a call of this thread, other than the asking call, holds `running` of a group's Progress."""
    calls = 0
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code in _CLAIMING:
            names = frame.f_locals
            calls += names["self"]._progress is progress and names.get("step", calls) is not None
        frame = frame.f_back
    return calls > 1  # the one that asks has not got it
