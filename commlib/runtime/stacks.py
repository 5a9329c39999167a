"""Stacks: where all threads of this process are, and where in that the user's own code is."""

from __future__ import annotations

import linecache
import site
import sys
import sysconfig
import threading
import traceback
from functools import cache
from pathlib import Path

from commlib.observe.dump import Frame, ThreadState

_HOME = Path(__file__).parents[2]
# Installed, all of them lie side by side; in a checkout the adapters have a folder of their own.
_OURS = (
    f"{_HOME}/commlib/",
    *(f"{home}/commlib_{framework}/" for home in (_HOME, _HOME / "adapters") for framework in ("torch", "tensorflow")),
)


@cache
def _libraries() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    found = [paths["stdlib"], paths["platstdlib"], paths["purelib"], paths["platlib"], *site.getsitepackages()]
    return tuple(f"{path}/" for path in dict.fromkeys([*found, site.getusersitepackages()]))


def is_ours(file: str) -> bool:
    """Return whether a file of source is commlib's or an adapter's."""
    return file.startswith(_OURS)


def is_users(file: str) -> bool:
    """Return whether a file is neither ours nor a library's."""
    return not (is_ours(file) or file.startswith(("<frozen", *_libraries())))


def all_threads(besides: int = 0) -> tuple[ThreadState, ...]:
    """Return the threads of this process, the main one first. besides: the identifier of one that is left out."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    frames = sys._current_frames()
    order = sorted(frames.keys() - {besides}, key=lambda identifier: (identifier != main, identifier))
    return tuple(
        _thread(names.get(identifier, "not Python's own"), identifier, frames[identifier]) for identifier in order
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
    """Return the index of the last frame of the user's; -1: none.

    In the main thread else of the last that is neither ours nor Python's: the user's code may have been installed.
    """
    files = [frame.file for frame in stack]
    last = max((index for index, file in enumerate(files) if is_users(file)), default=-1)
    if last >= 0 or not is_main:
        return last
    standard = (sysconfig.get_paths()["stdlib"] + "/", "<frozen")
    own = [not (is_ours(file) or (file.startswith(standard) and "site-packages" not in file)) for file in files]
    return max((index for index, is_own in enumerate(own) if is_own), default=-1)
