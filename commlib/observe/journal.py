"""Journal: record the operations of one group while a recorder is set."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from time import monotonic_ns
from types import TracebackType
from typing import Any, TypeVar

from commlib.observe.recorder import Mark, Record, Recorder

T = TypeVar("T")


_NOTHING = nullcontext()


class Journal:
    """The operations of one group. They run one after another, so the journal has at most one running operation.

    key: unique among groups. call_number: returns the number of the group's last call.
    """

    __slots__ = ("_call_number", "_key", "current", "name", "recorder")

    def __init__(self, name: str = "", key: str = "", call_number: Callable[[], int] = lambda: 0) -> None:
        self.name, self._key, self._call_number = name, key or name, call_number
        self.recorder: Recorder | None = None  # None: nothing is recorded
        self.current: Record | None = None  # the running operation, if it is recorded

    def open(self, text: str, x: Any = None) -> Record | None:
        """Return a record for an operation on the array `x`; None if nothing is recorded."""
        recorder = self.recorder
        if recorder is None:
            return None
        return Record(recorder, text, self.name, self._key, nbytes=getattr(x, "nbytes", -1))

    def queue(self, text: str, x: Any = None) -> Record | None:
        """Return the record of an operation that waits for its turn."""
        if (record := self.open(text, x)) is not None:
            record.queue()
        return record

    def begin(self, record: Record, do: Callable[[], bool]) -> bool:
        """Begin an operation by calling `do`; return its result: whether the operation has already ended."""
        record.sequence = self._call_number() + 1
        record.begin()
        before, self.current = self.current, record
        try:
            ended = do()
        except BaseException as error:
            record.end(error)
            raise
        finally:
            self.current = before
        if ended:
            record.end()
        return ended

    def run(self, record: Record | None, do: Callable[[], T]) -> T:
        """Run the operation, which has its turn, and return its value."""
        if record is None:
            return do()
        record.sequence = record.sequence or self._call_number() + 1
        record.run()
        before, self.current = self.current, record
        try:
            value = do()
        except BaseException as error:
            record.end(error)
            raise
        finally:
            self.current = before
        record.end()
        return value

    def span(self, category: str, name: str, **facts: Any) -> AbstractContextManager[Any]:
        """Return a context manager that marks the begin and end of its block if a timeline is written: see `Mark`."""
        recorder = self.recorder
        if recorder is None or recorder.trace is None:
            return _NOTHING
        return _SpanMarker(recorder, category, name, (self._key, category), {"calls": self._key, **facts})

    def step(self, who: str) -> None:
        """Record the end of a training step, as reported by `who`."""
        recorder = self.recorder
        if recorder is not None and recorder.trace is not None:
            recorder.trace(Mark(monotonic_ns(), "i", "step", "step", ("step", who), {"by": who}))


class _SpanMarker:
    """Marks the begin and the end of a `with` block."""

    __slots__ = ("_category", "_facts", "_name", "_recorder", "_row")

    def __init__(
        self, recorder: Recorder, category: str, name: str, row: tuple[str, str], facts: dict[str, Any]
    ) -> None:
        self._recorder, self._category, self._name, self._row, self._facts = recorder, category, name, row, facts

    def __enter__(self) -> None:
        self._mark("B", self._facts)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._mark("E", {} if error is None else {"error": f"{type(error).__name__}: {error}"})

    def _mark(self, phase: str, facts: dict[str, Any]) -> None:
        if (trace := self._recorder.trace) is not None:  # otherwise the timeline was closed in the meantime
            trace(Mark(monotonic_ns(), phase, self._category, self._name, self._row, facts))


def journal_of(comm: Any) -> Journal:
    """Return the journal of a communicator; an unread one for an object without a group, such as a single rank."""
    group = getattr(comm, "group", None)
    return Journal() if group is None else group.progress.journal
