"""Stacks: the stacks of all threads of this process, and the user's own code in them."""

from __future__ import annotations

import linecache
import sys
import sysconfig
import threading
import traceback

from commlib.observe.dump import Frame, ThreadState
from commlib.process.sources import is_ours, is_users


def all_threads(besides: int = 0) -> tuple[ThreadState, ...]:
    """Return the threads of this process, the main thread first. besides: the identifier of a thread to omit."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    frames = sys._current_frames()
    order = sorted(frames.keys() - {besides}, key=lambda identifier: (identifier != main, identifier))
    return tuple(
        _thread(names.get(identifier, "not a Python thread"), identifier, frames[identifier]) for identifier in order
    )


def _thread(name: str, identifier: int, top: object) -> ThreadState:
    stack = []
    for frame, line in traceback.walk_stack(top):  # type: ignore[arg-type]  # a FrameType
        code = frame.f_code
        text = linecache.getline(code.co_filename, line, frame.f_globals).strip()
        stack.append(Frame(code.co_filename, line, code.co_name, text))
    stack.reverse()
    user = _last_of_user(stack, is_main=identifier == threading.main_thread().ident)
    inside = user >= 0 and any(is_ours(frame.file) for frame in stack[user + 1 :])
    return ThreadState(name, identifier, tuple(stack), user, inside)


def _last_of_user(stack: list[Frame], *, is_main: bool) -> int:
    """Return the index of the last frame of the user's code; -1: none.

    In the main thread, without such a frame, it is the last frame outside of commlib and Python: the user's code may be
    an installed package.
    """
    files = [frame.file for frame in stack]
    last = max((index for index, file in enumerate(files) if is_users(file)), default=-1)
    if last >= 0 or not is_main:
        return last
    standard = (sysconfig.get_paths()["stdlib"] + "/", "<frozen")
    own = [not (is_ours(file) or (file.startswith(standard) and "site-packages" not in file)) for file in files]
    return max((index for index, is_own in enumerate(own) if is_own), default=-1)
