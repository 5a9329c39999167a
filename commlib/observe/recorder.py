"""Recorder: one ring of the events of operations, and the readers that get each event as it is written.

Each operation has one `Record`, and its events point to it. An event therefore costs one tuple and one append, and
facts learned later (such as the number of a call that was queued) also appear in its earlier events.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from enum import Enum
from functools import lru_cache
from time import monotonic_ns
from typing import Any, NamedTuple

# Events kept by default.
CAPACITY = 4096

MESSAGES = "messages"
"""The `row` of messages between two ranks, which may overlap."""


class Phase(Enum):
    """The kind of an event in the life of an operation.

    QUEUED: it waits for its turn; a named one waits for the other ranks. BEGUN: its data is published, and no thread
    waits yet. RUN: it has its turn; a message is posted. ROUND: messages of its schedule are posted, or it waits on
    its node; a named one is packed with others, reduced or unpacked. END: it has ended, with or without an error. MARK:
    an event that belongs to no operation. COUNT: counts, such as the load of experts, in the event's detail.
    """

    QUEUED = "queued"
    BEGUN = "begun"
    RUN = "run"
    ROUND = "round"
    END = "end"
    MARK = "mark"
    COUNT = "count"


@lru_cache(1024)
def _verb(text: str) -> str:
    return text.replace(",", " ").partition(" ")[0]


class Record:
    """One operation. It holds no array.

    number: counts the operations of this process, from 1. sequence: the number of the call in its group, the same on
    all ranks; 0 before its turn, and for messages, which are not ordered. nbytes: the size of this rank's array; -1 if
    unknown. name: the name that the user gave it, "" for most. row: equal for operations that cannot overlap. queued,
    began, posted (its last round, described by `detail`), ended: monotonic ns, or 0. in_call: whether all of it runs
    within the call that started it, in its caller's thread; meaningless for messages.
    """

    __slots__ = (
        "_recorder", "began", "detail", "ended", "error", "group", "in_call", "name", "nbytes", "number", "posted",
        "queued", "row", "sequence", "text",
    )  # fmt: skip

    def __init__(
        self, recorder: Recorder, text: str, group: str, row: Hashable, *, nbytes: int = -1, name: str = ""
    ) -> None:
        self._recorder, self.number = recorder, next(recorder.numbers)
        self.text, self.group, self.row, self.nbytes, self.name = text, group, row, nbytes, name
        self.sequence = self.queued = self.began = self.posted = self.ended = 0
        self.detail = self.error = ""
        self.in_call = True  # until it is queued or continues in a later call

    def __repr__(self) -> str:
        number = f" (call {self.sequence})" if self.sequence else ""
        return f"{self.name + ': ' if self.name else ''}{self.text}{number}"

    @property
    def verb(self) -> str:
        """The name of the call, without its arguments."""
        return _verb(self.text)

    def queue(self) -> None:
        """Record that it is queued."""
        self.in_call = False
        self.queued = self._recorder.write(self, Phase.QUEUED)

    def begin(self) -> None:
        """Record that its data is published."""
        self.began = self._recorder.write(self, Phase.BEGUN)

    def run(self) -> None:
        """Record that it has its turn."""
        time = self._recorder.write(self, Phase.RUN)
        if self.began:  # in an earlier call
            self.in_call = False
        self.began = self.began or time

    def round(self, detail: str) -> None:
        """Record its progress."""
        self.posted, self.detail = self._recorder.write(self, Phase.ROUND, detail), detail

    def end(self, error: BaseException | None = None) -> None:
        """Record its end; only the first call counts."""
        if not self.ended:
            if error is not None:
                self.error = f"{type(error).__name__}: {error}"
            self.ended = monotonic_ns()  # set first: readers of the event use it
            self._recorder.write(self, Phase.END, self.error)

    def waits(self) -> int:
        """Record that a user thread starts to wait for it; return the time, for `waited`."""
        now = monotonic_ns()
        if (trace := self._recorder.trace) is not None:
            trace(Mark(now, "b", "wait", self.verb, threading.get_ident(), self))
        return now

    def spent(self, since: int) -> None:
        """Record that a user thread has spent the time since then on it."""
        self._recorder.exposed(self, monotonic_ns() - since)

    def waited(self, since: int) -> None:
        """Record that the wait has ended."""
        self.spent(since)
        if (trace := self._recorder.trace) is not None:
            trace(Mark(monotonic_ns(), "e", "wait", self.verb, threading.get_ident(), {}))


class Event(NamedTuple):  # not a dataclass: each operation creates several, and this takes half the time
    """One event of an operation. time: monotonic ns. thread: its identifier."""

    time: int
    phase: Phase
    record: Record
    thread: int
    detail: str

    @property
    def group(self) -> str:
        return self.record.group

    @property
    def verb(self) -> str:
        return self.record.verb

    @property
    def sequence(self) -> int:
        return self.record.sequence

    def __str__(self) -> str:
        return f"{self.time / 1e9:.6f} s {self.phase.value:6} {self.group}: {self.record!r} {self.detail}".rstrip()


class Mark(NamedTuple):
    """The begin or the end of an activity other than an operation, for a timeline. time: monotonic ns.

    phase: as in Chrome's format, "B" and "E" (which nest in a row), "b" and "e" (which may overlap), "i" (no length).
    category: "wait" (of a thread, for an operation), "pack", "codec", "pipeline" (an action), "bucket" (from its launch
    to its end), "step" (it has ended). row: equal for marks drawn in one line; for a wait, its thread. facts: further
    facts; for a wait, the operation's record.
    """

    time: int
    phase: str
    category: str
    name: str
    row: Hashable
    facts: Mapping[str, Any] | Record


def call_key(record: Record) -> str:
    """Return the key that numbers the calls of an operation: the same text on all ranks that participate in it.

    It is the group's key, or for a named operation the name of its group; "" for messages.
    """
    if record.row == MESSAGES:
        return ""
    return f"{record.group} by name" if record.name else str(record.row)


Reader = Callable[[Event], None]


def _ignore_exposed(record: Record, nanoseconds: int) -> None:
    pass


class Recorder:
    """Holds the last `capacity` events of this process. Any thread may write without waiting: an append is atomic."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self.numbers = itertools.count(1)
        self.marks_cycles = False  # whether to mark each negotiation
        self.trace: Callable[[Mark], None] | None = None  # the receiver of marks: a timeline
        self.exposed: Callable[[Record, int], None] = _ignore_exposed
        """Called with the ns that a user thread has waited for an operation."""
        self._ring: deque[Event] = deque(maxlen=capacity)
        self._readers: tuple[Reader, ...] = ()
        self._changing = threading.Lock()  # guards the tuple of readers

    def write(self, record: Record, phase: Phase, detail: str = "") -> int:
        """Write one event, and return its time. Calls the readers in this thread: they must neither block nor raise."""
        event = Event(monotonic_ns(), phase, record, threading.get_ident(), detail)
        self._ring.append(event)
        for read in self._readers:
            read(event)
        return event.time

    def mark(self, what: str, group: str) -> None:
        """Write an event that belongs to no operation."""
        self.write(Record(self, what, group, ""), Phase.MARK)

    def count(self, what: str, group: str, numbers: Iterable[int]) -> None:
        """Write counts."""
        self.write(Record(self, what, group, ""), Phase.COUNT, " ".join(map(str, numbers)))

    def events(self, group: str = "") -> list[Event]:
        """Return the events in the ring, all or only of one group, oldest first.

        Events of different threads may be some microseconds out of order.
        """
        return [event for event in list(self._ring) if not group or event.group == group]

    def subscribe(self, read: Reader) -> None:
        """Call `read` with each event from now on."""
        with self._changing:
            self._readers = (*self._readers, read)

    def unsubscribe(self, read: Reader) -> None:
        """Stop calling `read`; a write in progress may still call it."""
        with self._changing:
            self._readers = tuple(reader for reader in self._readers if reader != read)
