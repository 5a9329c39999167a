"""Raise an exception at each place in turn where a signal handler might: at a function's start, or after a C call."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


class Raised(Exception):
    """What a signal handler might raise."""


def raise_at(number: int, file: str, call: Callable[[], Any]) -> bool:
    """Run `call`, and raise Raised at the place of that number, among the places in `file` that this thread reaches.

    Returns whether that place was reached, and the exception raised.
    """
    remaining = number

    def profile(frame: Any, event: str, argument: object) -> None:
        nonlocal remaining
        if event in ("call", "c_return") and frame.f_code.co_filename.endswith(file):
            remaining -= 1
            if remaining == 0:
                sys.setprofile(None)
                raise Raised

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        call()
    except Raised:
        return True
    finally:
        sys.setprofile(before)
    return False
