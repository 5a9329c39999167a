"""Recorder: one ring of what happens to operations, and who reads it as it is written.

An operation is one `Record`, made once; its events point to it. So an event costs a tuple and an append, and what is
known later (the number of a call that has waited in the queue) is in its earlier events too.
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

# Events that are kept unless the user wants another number.
CAPACITY = 4096

MESSAGES = "messages"
"""The `row` of messages between two ranks, which may overlap."""


class Phase(Enum):
    """Name what happens to an operation.

    QUEUED: waits for its turn, or a named one for the other ranks. BEGUN: its data is published, and nobody waits yet.
    RUN: its turn has come; a message: it is posted. ROUND: messages of its schedule are posted, or it waits on its
    node; a named one is packed with others, reduced or unpacked. END: it has ended, well or not. MARK: something else
    happened. COUNT: numbers of something, such as the load of experts, are in the event's detail.
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
    all ranks; 0 before its turn, and for messages, which have no place in that order. nbytes: of this rank's array; -1
    if that is not known. name: what the user calls it, "" for most. row: the same for what cannot overlap. queued,
    began, posted (its last round, of which `detail` tells), ended: monotonic ns, or 0. in_call: whether all of it runs
    in the call that started it, in its caller's thread; of no meaning for messages.
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
        self.in_call = True  # until it is known better

    def __repr__(self) -> str:
        number = f" (call {self.sequence})" if self.sequence else ""
        return f"{self.name + ': ' if self.name else ''}{self.text}{number}"

    @property
    def verb(self) -> str:
        """What is called, without what it is called with."""
        return _verb(self.text)

    def queue(self) -> None:
        """Say that it waits."""
        self.in_call = False
        self.queued = self._recorder.write(self, Phase.QUEUED)

    def begin(self) -> None:
        """Say that its data is published."""
        self.began = self._recorder.write(self, Phase.BEGUN)

    def run(self) -> None:
        """Say that its turn has come."""
        time = self._recorder.write(self, Phase.RUN)
        if self.began:  # in an earlier call
            self.in_call = False
        self.began = self.began or time

    def round(self, detail: str) -> None:
        """Say how far it is."""
        self.posted, self.detail = self._recorder.write(self, Phase.ROUND, detail), detail

    def end(self, error: BaseException | None = None) -> None:
        """Say that it has ended; once."""
        if not self.ended:
            if error is not None:
                self.error = f"{type(error).__name__}: {error}"
            self.ended = monotonic_ns()  # readers of the event look at it
            self._recorder.write(self, Phase.END, self.error)

    def waits(self) -> int:
        """Say that a thread of the user's waits for it from now on; return the time, for `waited`."""
        now = monotonic_ns()
        if (trace := self._recorder.trace) is not None:
            trace(Mark(now, "b", "wait", self.verb, threading.get_ident(), self))
        return now

    def spent(self, since: int) -> None:
        """Say that a thread of the user's was busy with it since then."""
        self._recorder.exposed(self, monotonic_ns() - since)

    def waited(self, since: int) -> None:
        """Say that it waits no more."""
        self.spent(since)
        if (trace := self._recorder.trace) is not None:
            trace(Mark(monotonic_ns(), "e", "wait", self.verb, threading.get_ident(), {}))


class Event(NamedTuple):  # no dataclass: several are made for each operation, and this takes half the time
    """One thing that happened. time: monotonic ns. thread: its identifier."""

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
    """The begin or the end of something beside the operations, for a timeline. time: monotonic ns.

    phase: as in Chrome's format, "B" and "E" (which nest in a row), "b" and "e" (which may overlap), "i" (no length).
    category: "wait" (a thread, for an operation), "pack", "codec", "pipeline" (an action), "bucket" (from
    its launch to its end), "step" (it has ended). row: the same for what is drawn in one line; of a wait its thread.
    facts: what else is known; of a wait, the operation's record.
    """

    time: int
    phase: str
    category: str
    name: str
    row: Hashable
    facts: Mapping[str, Any] | Record


def of(record: Record) -> str:
    """Return what numbers the calls of an operation: the same text on all ranks that take part in it.

    A group's key, or the name of the group in which operations have names; "" for messages.
    """
    if record.row == MESSAGES:
        return ""
    return f"{record.group} by name" if record.name else str(record.row)


Reader = Callable[[Event], None]


def _ignore_exposed(record: Record, nanoseconds: int) -> None:
    pass


class Recorder:
    """Hold the last `capacity` events of this process. Any thread may write without a wait: an append is atomic."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self.numbers = itertools.count(1)
        self.marks_cycles = False  # somebody wants to know when ranks negotiate
        self.trace: Callable[[Mark], None] | None = None  # who wants marks: nobody but a timeline
        self.exposed: Callable[[Record, int], None] = _ignore_exposed
        """Who wants to know for how many ns a thread of the user's has waited for an operation."""
        self._ring: deque[Event] = deque(maxlen=capacity)
        self._readers: tuple[Reader, ...] = ()
        self._changing = threading.Lock()  # of who reads

    def write(self, record: Record, phase: Phase, detail: str = "") -> int:
        """Write one event, and return its time. Readers are called in this thread: they must not wait, nor raise."""
        event = Event(monotonic_ns(), phase, record, threading.get_ident(), detail)
        self._ring.append(event)
        for read in self._readers:
            read(event)
        return event.time

    def mark(self, what: str, group: str) -> None:
        """Write that something happened to no operation in particular."""
        self.write(Record(self, what, group, ""), Phase.MARK)

    def count(self, what: str, group: str, numbers: Iterable[int]) -> None:
        """Write numbers of something."""
        self.write(Record(self, what, group, ""), Phase.COUNT, " ".join(map(str, numbers)))

    def events(self, group: str = "") -> list[Event]:
        """Return what the ring holds, or what it holds of one group, oldest first.

        Those of different threads may be some microseconds out of order.
        """
        return [event for event in list(self._ring) if not group or event.group == group]

    def subscribe(self, read: Reader) -> None:
        """Call `read` with each event from now on."""
        with self._changing:
            self._readers = (*self._readers, read)

    def unsubscribe(self, read: Reader) -> None:
        """Call `read` no more, except for what is being written now."""
        with self._changing:
            self._readers = tuple(reader for reader in self._readers if reader != read)
