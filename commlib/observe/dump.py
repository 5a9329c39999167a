"""Dump: what one rank writes of itself when a job hangs, as data, and how it is written as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from commlib.errors import UsageError

VERSION = 1

Ranges = tuple[tuple[int, int], ...]
"""Ascending ranks as first and last ones: a dump of each of thousands of ranks names thousands."""

State = Literal["queued", "begun", "running", "ended"]


def ranges_of(ranks: Iterable[int]) -> Ranges:
    """Return ranks as ranges."""
    found: list[tuple[int, int]] = []
    for rank in sorted(ranks):
        if found and found[-1][1] == rank - 1:
            found[-1] = found[-1][0], rank
        else:
            found.append((rank, rank))
    return tuple(found)


def members(ranges: Ranges) -> Iterator[int]:
    """Yield the ranks of ranges."""
    for first, last in ranges:
        yield from range(first, last + 1)


@dataclass(frozen=True, slots=True)
class Operation:
    """One call of a group.

    sequence: its number in the group, the same on all ranks; 0 while it is queued, and for those that have names
    instead. nbytes: of this rank's array, -1 where its text does not tell.
    """

    verb: str
    text: str
    sequence: int
    nbytes: int
    state: State


@dataclass(frozen=True, slots=True)
class GroupState:
    """One group, as this rank sees it.

    key: what no other group of the job is called. ranks: its members, by their ranks in the world. calls: how many have
    come to their turn, the running one included. operations: the last ones, oldest first. failure: why it runs no more.
    """

    key: str
    name: str
    ranks: Ranges
    calls: int
    operations: tuple[Operation, ...]
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Wait:
    """One wait of this rank.

    group: its key. sequence: the number of the call that waits, 0 for a message. peers: the ranks in the world that are
    waited for; None for all of the group. thread: the identifier of the thread that waits.
    """

    text: str
    group: str
    sequence: int
    seconds: float
    peers: tuple[int, ...] | None
    thread: int


@dataclass(frozen=True, slots=True)
class Named:
    """One operation that goes by its name, and that some rank has not asked for yet. group: the name of its group."""

    group: str
    name: str
    text: str
    ranks: Ranges
    seconds: float


@dataclass(frozen=True, slots=True)
class Frame:
    """One call on a stack: the line that was reached, and its text."""

    file: str
    line: int
    function: str
    code: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}" + (f": {self.code}" if self.code else "")


@dataclass(frozen=True, slots=True)
class ThreadState:
    """One thread: its stack, the caller first.

    user: the index of the user's own frame in the stack, the last one that belongs to no library; -1 where there is
    none. inside: whether commlib was called from there.
    """

    name: str
    identifier: int
    stack: tuple[Frame, ...]
    user: int
    inside: bool

    @property
    def place(self) -> Frame | None:
        """Where the user's code is."""
        return self.stack[self.user] if self.user >= 0 else None


@dataclass(frozen=True, slots=True)
class ProcessState:
    """A process of the job on the host of whoever looked. state: a letter of /proc (T: stopped), "" if it is gone."""

    rank: int
    host: str
    process: int
    state: str


@dataclass(frozen=True, slots=True)
class Dump:
    """What one rank writes.

    hang: counts the hangs of the job, from 1. time: seconds since 1970. after: seconds without progress after which it
    was written. neighbours: the other ranks' processes on this host. threads: the main one first.
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
    named: tuple[Named, ...]
    threads: tuple[ThreadState, ...]
    neighbours: tuple[ProcessState, ...]

    def to_json(self) -> str:
        """Return it as JSON."""
        return json.dumps({"version": VERSION, **asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str, source: str) -> Dump:
        """Return what `to_json` was made of. Raises UsageError, which names the source, for anything else."""
        try:
            fields = json.loads(text)
            version = fields.pop("version")
            if version != VERSION:
                raise UsageError(f"{source}: a dump of version {version}, expected {VERSION}: read it with its commlib")
            return _dump(fields)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"{source}: not a dump of a rank: {type(error).__name__}: {error}") from None


def _dump(fields: dict[str, Any]) -> Dump:
    waits = tuple(Wait(**{**wait, "peers": _ranks(wait["peers"])}) for wait in fields.pop("waits"))
    named = tuple(Named(**{**name, "ranks": _ranges(name["ranks"])}) for name in fields.pop("named"))
    groups = tuple(map(_group, fields.pop("groups")))
    threads = tuple(map(_thread, fields.pop("threads")))
    neighbours = tuple(ProcessState(**process) for process in fields.pop("neighbours"))
    return Dump(**fields, waits=waits, named=named, groups=groups, threads=threads, neighbours=neighbours)


def _ranks(given: list[int] | None) -> tuple[int, ...] | None:
    return None if given is None else tuple(given)


def _ranges(given: list[list[int]]) -> Ranges:
    return tuple((first, last) for first, last in given)


def _group(fields: Mapping[str, Any]) -> GroupState:
    operations = tuple(Operation(**operation) for operation in fields["operations"])
    return GroupState(**{**fields, "ranks": _ranges(fields["ranks"]), "operations": operations})


def _thread(fields: Mapping[str, Any]) -> ThreadState:
    return ThreadState(**{**fields, "stack": tuple(Frame(**frame) for frame in fields["stack"])})
