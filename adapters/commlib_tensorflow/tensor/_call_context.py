"""Call context: Keras' record of the outermost layer call, such as whether it trains."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

try:  # not public; without it the outermost caller is unknown
    from keras.src.backend.common.global_state import get_global_attribute, set_global_attribute
except ImportError:

    def get_global_attribute(name: str) -> Any:
        return None

    def set_global_attribute(name: str, value: Any) -> None:
        return None


_CALL, _CASTS = "current_call_ctx", "autocast_scope"


def current_call() -> Any:
    """Return Keras' context, from the outermost layer's call to its end; None outside of all calls."""
    return get_global_attribute(_CALL)


def is_running(layer: Any) -> bool:
    """Return whether a layer's call is running now, called from any other layer; its other methods do not count."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        is_call = code.co_name in _CALLS and code.co_argcount and code.co_varnames[0] == "self"
        if is_call and frame.f_locals.get("self") is layer:
            return True
        frame = frame.f_back
    return False


_CALLS = "__call__", "call"


@contextmanager
def isolate_call() -> Iterator[None]:
    """Make a nested call the outermost one, and restore the outer call afterwards.

    The nested call then casts by its own policy; meanwhile variables are not autocast.
    """
    before = {name: get_global_attribute(name) for name in (_CALL, _CASTS)}
    for name in before:
        set_global_attribute(name, None)
    try:
        yield
    finally:
        for name, value in before.items():
            set_global_attribute(name, value)
