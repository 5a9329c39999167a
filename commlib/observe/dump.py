"""Dump: the state that one rank writes as JSON when a job hangs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from commlib.errors import UsageError

VERSION = 1

Ranges = tuple[tuple[int, int], ...]
"""Ascending ranks as (first, last) pairs: each of thousands of dumps lists thousands of ranks."""

CallPhase = Literal["queued", "begun", "running", "ended"]


def ranges_of(ranks: Iterable[int]) -> Ranges:
    """Return ranks as ranges."""
    ranges: list[tuple[int, int]] = []
    for rank in sorted(ranks):
        if ranges and ranges[-1][1] == rank - 1:
            ranges[-1] = ranges[-1][0], rank
        else:
            ranges.append((rank, rank))
    return tuple(ranges)


def members(ranges: Ranges) -> Iterator[int]:
    """Yield the ranks in ranges."""
    for first, last in ranges:
        yield from range(first, last + 1)


@dataclass(frozen=True, slots=True)
class CallState:
    """One call of a group.

    sequence: its number in the group, the same on all ranks; 0 while it is queued, and for named operations. nbytes:
    the size of this rank's array; -1 if its text has no size.
    """

    verb: str
    text: str
    sequence: int
    nbytes: int
    state: CallPhase


@dataclass(frozen=True, slots=True)
class GroupState:
    """One group, as this rank sees it.

    key: unique among the groups of the job. ranks: its members, as world ranks. calls: the number of calls that have
    started to run. operations: the last ones, oldest first. failure: the reason why the group
    accepts no more calls.
    """

    key: str
    name: str
    ranks: Ranges
    calls: int
    operations: tuple[CallState, ...]
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Wait:
    """One wait of this rank.

    group: its key. sequence: the number of the waiting call, 0 for a message. peers: the awaited ranks, as world ranks;
    None for the whole group. thread: the identifier of the waiting thread.
    """

    text: str
    group: str
    sequence: int
    seconds: float
    peers: tuple[int, ...] | None
    thread: int


@dataclass(frozen=True, slots=True)
class NamedCall:
    """One named operation that some rank has not requested yet. group: the name of its group."""

    group: str
    name: str
    text: str
    ranks: Ranges
    seconds: float


@dataclass(frozen=True, slots=True)
class Frame:
    """One stack frame: the line it has reached, and the text of that line."""

    file: str
    line: int
    function: str
    code: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}" + (f": {self.code}" if self.code else "")


@dataclass(frozen=True, slots=True)
class ThreadState:
    """One thread and its stack, the outermost frame first.

    user: the index in the stack of the last frame outside any library; -1 if there is none. inside: whether that frame
    called commlib.
    """

    name: str
    identifier: int
    stack: tuple[Frame, ...]
    user: int
    inside: bool

    @property
    def place(self) -> Frame | None:
        """The innermost frame of the user's code."""
        return self.stack[self.user] if self.user >= 0 else None


@dataclass(frozen=True, slots=True)
class ProcessState:
    """A process of the job on the dumping rank's host. state: its letter in /proc (T: stopped), "" if it has exited."""

    rank: int
    host: str
    process: int
    state: str


@dataclass(frozen=True, slots=True)
class Dump:
    """The state that one rank writes.

    hang: the number of this hang in the job, from 1; 0: dumped on request. time: seconds since 1970. after: the seconds
    without progress that trigger a dump. neighbours: the processes of the other ranks on this host. threads: the main
    thread first.
    """

    hang: int
    rank: int
    size: int
    host: str
    process: int
    time: float
    after: float
    waits: tuple[Wait, ...]
    groups: tuple[GroupState, ...]
    named: tuple[NamedCall, ...]
    threads: tuple[ThreadState, ...]
    neighbours: tuple[ProcessState, ...]

    def to_json(self) -> str:
        """Return the dump as JSON."""
        return json.dumps({"version": VERSION, **asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str, source: str) -> Dump:
        """Return the dump that `to_json` wrote. Raises UsageError, which names the source, for any other text."""
        try:
            fields = json.loads(text)
            version = fields.pop("version")
            if version != VERSION:
                raise UsageError(
                    f"{source}: a dump of version {version}, expected {VERSION}: read it with the commlib that wrote it"
                )
            return _dump(fields)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"{source}: not a dump of a rank: {type(error).__name__}: {error}") from None


def _dump(fields: dict[str, Any]) -> Dump:
    waits = tuple(Wait(**{**wait, "peers": _ranks(wait["peers"])}) for wait in fields.pop("waits"))
    named = tuple(NamedCall(**{**name, "ranks": _ranges(name["ranks"])}) for name in fields.pop("named"))
    groups = tuple(map(_group, fields.pop("groups")))
    threads = tuple(map(_thread, fields.pop("threads")))
    neighbours = tuple(ProcessState(**process) for process in fields.pop("neighbours"))
    return Dump(**fields, waits=waits, named=named, groups=groups, threads=threads, neighbours=neighbours)


def _ranks(values: list[int] | None) -> tuple[int, ...] | None:
    return None if values is None else tuple(values)


def _ranges(values: list[list[int]]) -> Ranges:
    return tuple((first, last) for first, last in values)


def _group(fields: Mapping[str, Any]) -> GroupState:
    operations = tuple(CallState(**operation) for operation in fields["operations"])
    return GroupState(**{**fields, "ranks": _ranges(fields["ranks"]), "operations": operations})


def _thread(fields: Mapping[str, Any]) -> ThreadState:
    return ThreadState(**{**fields, "stack": tuple(Frame(**frame) for frame in fields["stack"])})
