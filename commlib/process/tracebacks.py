"""Tracebacks: an exception as text for the user, with the frames inside commlib folded into a line."""

from __future__ import annotations

import builtins
import traceback
from collections.abc import Iterable, Iterator
from itertools import groupby
from traceback import FrameSummary, StackSummary, TracebackException
from types import TracebackType

from commlib.errors import CommlibError
from commlib.process.sources import is_ours, is_users
from commlib.suggestions import nearest


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


def message_of(error: BaseException) -> str:
    """Return an exception's text, as Python prints it: its `__str__` may fail."""
    try:
        return str(error)
    except Exception:
        return "<exception str() failed>"


def entered_call(trace: TracebackType | None) -> str:
    """Return the name of commlib's function that the user's code called last; "" if the error is not from a call."""
    files = [(frame.filename, frame.name) for frame in traceback.extract_tb(trace)]
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
        trace.stack = _Stack([*_folded(frames[:last]), *frames[last:]])
    for other in (trace.__cause__, trace.__context__, *(trace.exceptions or ())):
        if other is not None:
            _fold(other, seen)


def _folded(frames: Iterable[FrameSummary]) -> Iterator[FrameSummary]:
    for ours, run in groupby(frames, lambda frame: is_ours(frame.filename)):
        inside = list(run)
        if not ours:
            yield from inside
            continue
        folded = _FoldedFrames(inside[0].filename, inside[0].lineno, inside[0].name)
        folded.text = (
            f"  ({len(inside)} frame{'s' * (len(inside) > 1)} inside commlib; COMMLIB_TRACEBACK=full shows them)\n"
        )
        yield folded


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
