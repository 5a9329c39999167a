"""Journal: what one group writes to the recorder, while there is one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from commlib.observe.recorder import Record, Recorder

T = TypeVar("T")


class Journal:
    """The operations of one group. They run one after another, so it knows which of them does.

    key: what no other group is called. call_number: returns the number of the last call of the group.
    """

    __slots__ = ("_call_number", "_key", "current", "name", "recorder")

    def __init__(self, name: str = "", key: str = "", call_number: Callable[[], int] = lambda: 0) -> None:
        self.name, self._key, self._call_number = name, key or name, call_number
        self.recorder: Recorder | None = None  # None: nobody wants to know
        self.current: Record | None = None  # what runs now, if it is recorded

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
        """Begin an operation, and return what `do` does: whether it has ended, too."""
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
        """Run an operation whose turn has come, and return its value."""
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
