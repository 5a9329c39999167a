"""Tracebacks: an exception as text for the user, with the frames inside commlib folded into a line."""

from __future__ import annotations

import builtins
import os
import re
import traceback
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from traceback import FrameSummary, StackSummary, TracebackException
from types import TracebackType
from typing import Any

from commlib.arguments import nearest
from commlib.errors import CommlibError
from commlib.process.sources import is_ours, is_users, is_wrapper

_FRAME = re.compile(r'( *)File "([^"]*)", line \d+, in (\S+)')
_NESTED = re.compile(r"\n*Traceback \(most recent call last\):\n(.*?)(?=\n\t \[\[|\Z)", re.DOTALL)
_LOCATED = "Detected at node"
"""TensorFlow puts it, with a stack, where it finds a node in a text."""
_NODE = re.compile(r"\n+\t \[\[\{\{node [^\n]*")


class _FoldedFrames(FrameSummary):
    """Some frames inside commlib."""

    text = ""


class _Stack(StackSummary):
    def format_frame_summary(self, frame: FrameSummary) -> str:
        return frame.text if isinstance(frame, _FoldedFrames) else super().format_frame_summary(frame)


def format_error(error: BaseException, *, full: bool = False) -> str:
    """Return an uncaught exception as Python prints it, but with the frames inside commlib folded.

    The frames stay if commlib itself seems to be at fault: an error of another type that left its code. full: fold
    none.
    """
    trace = TracebackException.from_exception(error, compact=True)
    if not full:
        _fold(trace, set())
    return "".join(trace.format()).rstrip("\n") + _suggestion(error) + "\n"


def shows_all(world: Any) -> bool:
    """Return whether commlib's own frames are shown. world: the communicator of all ranks, or None."""
    setting = os.environ.get("COMMLIB_TRACEBACK", "") if world is None else world.config.traceback
    return bool(setting == "full")


def fold_text(text: str) -> tuple[str, str]:
    """Fold the frames in the text of a commlib error from a traced function, which TensorFlow wrote there.

    Return the text, which has the message once, and the name of commlib's function that the user's code called last.
    """
    text = _NESTED.sub(lambda found: found[0] if _has_users(found[1]) else "", text)
    if _LOCATED in text:
        text = _NODE.sub("", text)
    text = text.rstrip()
    lines, folded, files, run = text.split("\n"), list[str](), list[tuple[str, str]](), list[str]()

    def end_run(indent: str) -> None:
        if run:
            folded.append(f"{indent}{_count_frames(len(run), 'commlib' if any(map(is_ours, run)) else 'libraries')}")
            run.clear()

    indent, skips = "", False
    for number, line in enumerate(lines):
        if frame := _FRAME.match(line):
            indent, file = frame[1], frame[2]
            files.append((file, frame[3]))
            skips = not is_users(file)
            if skips:
                run.append(file)
            else:
                end_run(indent)
                folded.append(line)
            continue
        inside = files and (
            line.startswith(f"{indent} ") or (not line and _FRAME.match("".join(lines[number + 1 : number + 2])))
        )
        if inside and skips:
            continue
        if not inside:
            skips = False
            end_run(indent)
        folded.append(line)
    end_run(indent)
    return "\n".join(folded), _last_entered(files)


def _has_users(text: str) -> bool:
    return any(is_users(frame[2]) for frame in _FRAME.finditer(text))


def message_of(error: BaseException) -> str:
    """Return an exception's text, as Python prints it: its `__str__` may fail."""
    try:
        return str(error)
    except Exception:
        return "<exception str() failed>"


def entered_call(trace: TracebackType | None) -> str:
    """Return the name of commlib's function that the user's code called last; "" if the error is not from a call."""
    return _last_entered([(frame.filename, frame.name) for frame in traceback.extract_tb(trace)])


def _last_entered(files: Sequence[tuple[str, str]]) -> str:
    user = max((index for index, (file, _) in enumerate(files) if not is_ours(file) and is_users(file)), default=-1)
    name = next((name for file, name in files[user + 1 :] if is_ours(file)), "")
    return "" if name.startswith(("_", "<")) else name


def _fold(trace: TracebackException, seen: set[int]) -> None:
    """Fold the frames of an exception, and of its causes."""
    if id(trace) in seen:
        return
    seen.add(id(trace))
    frames = list(trace.stack)
    is_own = trace.exc_type is not None and issubclass(trace.exc_type, CommlibError)
    last = (
        len(frames) if is_own else max((i + 1 for i, frame in enumerate(frames) if is_users(frame.filename)), default=0)
    )
    if trace.exc_type is TypeError and last < len(frames) and str(trace).startswith(f"{frames[last].name}() "):
        last = len(frames)  # the user has called this function with other arguments than it has
    if any(not is_ours(frame.filename) for frame in frames):
        trace.stack = _Stack([*_folded(frames[:last], is_own), *frames[last:]])
    for other in (trace.__cause__, trace.__context__, *(trace.exceptions or ())):
        if other is not None:
            _fold(other, seen)


def _folded(frames: Iterable[FrameSummary], is_own: bool) -> Iterator[FrameSummary]:
    """Fold the frames inside commlib; of commlib's errors also those of wrappers around its functions."""

    def is_inside(frame: FrameSummary) -> bool:
        return is_ours(frame.filename) or (is_own and is_wrapper(frame.filename))

    for ours, run in groupby(frames, is_inside):
        inside = list(run)
        if not ours:
            yield from inside
            continue
        folded = _FoldedFrames(inside[0].filename, inside[0].lineno, inside[0].name)
        of = "commlib" if any(is_ours(frame.filename) for frame in inside) else "libraries"
        folded.text = f"  {_count_frames(len(inside), of)}\n"
        yield folded


def _count_frames(count: int, of: str) -> str:
    return f"({count} frame{'s' * (count > 1)} inside {of}; COMMLIB_TRACEBACK=full shows them)"


def _suggestion(error: BaseException) -> str:
    """Return Python's own hint about a misspelled name, which some versions give only where they print the error."""
    try:
        return _nearest_name(error)
    except Exception:  # of the user's __str__ or __dir__
        return ""


def _nearest_name(error: BaseException) -> str:
    text = str(error)
    if "did you mean" in text.lower() or getattr(error, "__notes__", None):
        return ""
    if isinstance(error, AttributeError) and error.name and error.obj is not None:
        known = dir(error.obj)
    elif isinstance(error, NameError) and error.name and (trace := error.__traceback__) is not None:
        while trace.tb_next is not None:
            trace = trace.tb_next
        known = [*trace.tb_frame.f_locals, *trace.tb_frame.f_globals, *dir(builtins)]
    else:
        return ""
    near = nearest(error.name, known)
    return f". Did you mean: {near!r}?" if near and near != error.name else ""
