"""Calls of `sys.exit`: their code and place, which Python does not pass to exit hooks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from types import FrameType
from typing import Any, NamedTuple, NoReturn

from commlib.process.sources import is_users


class ExitCall(NamedTuple):
    """A call of `sys.exit` with another code than 0.

    code: 1 to 255. text: what the rank did, and where. calls: how many calls of commlib it had made.
    """

    code: int
    text: str
    calls: int


_last: ExitCall | None = None  # of the main thread


def watch(world: Callable[[], Any]) -> None:
    """Note each later call of `sys.exit`. world: returns the communicator of all ranks, or None."""
    import threading  # which `import commlib` does without

    plain = sys.exit

    @wraps(plain)
    def exit(status: Any = None, /) -> NoReturn:
        global _last
        if threading.current_thread() is threading.main_thread():
            with suppress(Exception):  # the note must not keep the program from its end
                _last = _describe(status, sys._getframe().f_back, _count_calls(world()))
        plain(status)

    sys.exit = exit


def last(world: Any) -> ExitCall | None:
    """Return the call that ends this program; None if its code was 0, or if it was caught and the program went on."""
    return _last if _last is not None and _count_calls(world) <= _last.calls else None


def _describe(status: Any, frame: FrameType | None, calls: int) -> ExitCall | None:
    code = 0 if status is None else status & 0xFF if isinstance(status, int) else 1
    if code == 0:
        return None
    while frame is not None and not is_users(frame.f_code.co_filename):  # such as argparse
        frame = frame.f_back
    call = f"sys.exit({int(status)})" if isinstance(status, int) else "sys.exit with a message"
    place = f" in {frame.f_code.co_filename}, line {frame.f_lineno}" if frame is not None else ""
    return ExitCall(code, f"called {call}{place}", calls)


def _count_calls(world: Any) -> int:
    return 0 if world is None else sum(group.call_number for group in list(world.runtime.groups))
