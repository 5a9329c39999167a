"""Counters: the number, bytes and times of each verb's calls in each group, and the time that user threads waited."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from types import MappingProxyType

from commlib.observe.recorder import MESSAGES, Event, Phase, Record


@dataclass(frozen=True, slots=True)
class Count:
    """The operations of one verb that have ended on this rank.

    calls: all of them. failed: those that ended in an error. nbytes: the bytes of this rank's arrays, where known.
    seconds: from the start of their turn to their end. waited: seconds in the queue before that. exposed: seconds in
    which user threads waited for them, in a blocking call or on a work handle; the rest overlapped with other work.
    """

    calls: int = 0
    failed: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    waited: float = 0.0
    exposed: float = 0.0

    def as_dict(self) -> dict[str, float]:
        """Return the fields by name."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Stats(Mapping[str, Count]):
    """The counts of one group on this rank, by verb."""

    counts: Mapping[str, Count] = field(default_factory=lambda: MappingProxyType({}))

    def __getitem__(self, verb: str) -> Count:
        return self.counts[verb]

    def __iter__(self) -> Iterator[str]:
        return iter(self.counts)

    def __len__(self) -> int:
        return len(self.counts)

    def as_dict(self) -> dict[str, dict[str, float]]:
        """Return the fields of each verb's count by name."""
        return {verb: count.as_dict() for verb, count in self.counts.items()}


class Counters:
    """A reader of the recorder."""

    def __init__(self) -> None:
        # Calls, failures, bytes, ns, ns in the queue, ns of waiting threads: updating a list takes a tenth of the
        # time of a new Count.
        self._sums: dict[tuple[str, str], list[int]] = {}
        self._lock = threading.RLock()  # a signal handler may interrupt `read` and enter again

    def read(self, event: Event) -> None:
        """Count an operation that has ended."""
        if event.phase is not Phase.END:
            return
        record = event.record
        began = record.began or record.ended  # if it never got its turn
        with self._lock:
            sums = self._of(record)
            sums[0] += 1
            sums[1] += bool(record.error)
            sums[2] += max(record.nbytes, 0)
            sums[3] += record.ended - began
            sums[4] += began - record.queued if record.queued else 0
            # Otherwise the waiting thread calls `expose`.
            sums[5] += record.ended - began if record.in_call and record.row != MESSAGES else 0

    def expose(self, record: Record, nanoseconds: int) -> None:
        """Add the time that a user thread waited for an operation, which may still be running."""
        with self._lock:
            self._of(record)[5] += nanoseconds

    def _of(self, record: Record) -> list[int]:
        return self._sums.setdefault((record.group, record.verb), [0, 0, 0, 0, 0, 0])

    def counts(self) -> dict[tuple[str, str], Count]:
        """Return the counts by (group, verb)."""
        with self._lock:
            return {
                kind: Count(n, bad, size, ns / 1e9, queued / 1e9, exposed / 1e9)
                for kind, (n, bad, size, ns, queued, exposed) in self._sums.items()
            }

    def stats(self, group: str) -> Stats:
        """Return the counts of one group."""
        return Stats({verb: count for (name, verb), count in self.counts().items() if name == group})
