"""Raise an exception at each place in turn where a signal handler might: as a function begins, or after one of C's."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


class Raised(Exception):
    """What a signal handler might raise."""


def raise_at(number: int, file: str, call: Callable[[], Any]) -> bool:
    """Run `call`, and raise Raised at the place of that number, of those that this thread comes to in `file`.

    Returns whether it came to so many, and it was raised.
    """
    left = number

    def profile(frame: Any, event: str, argument: object) -> None:
        nonlocal left
        if event in ("call", "c_return") and frame.f_code.co_filename.endswith(file):
            left -= 1
            if left == 0:
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
