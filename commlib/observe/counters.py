"""Counters: how often each verb was called in each group, on how many bytes, and how long that took."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from commlib.observe.recorder import Event, Phase, Record


@dataclass(frozen=True, slots=True)
class Count:
    """The operations of one kind that have ended on this rank.

    calls: all of them. failed: those that ended in an error. nbytes: of this rank's arrays, where that is known.
    seconds: from when their turn came to their end. waited: seconds in the queue before that.
    """

    calls: int = 0
    failed: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    waited: float = 0.0

    def with_one(self, record: Record) -> Count:
        """Return the count with one operation more, which has ended."""
        began = record.began or record.ended  # it has not come to its turn
        return Count(
            self.calls + 1,
            self.failed + bool(record.error),
            self.nbytes + max(record.nbytes, 0),
            self.seconds + (record.ended - began) / 1e9,
            self.waited + ((began - record.queued) / 1e9 if record.queued else 0.0),
        )


class Counters:
    """A reader of the recorder."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], Count] = {}
        self._lock = threading.RLock()  # a signal handler may come here in the middle of `read`

    def read(self, event: Event) -> None:
        """Count an operation that has ended."""
        if event.phase is Phase.END:
            kind = event.group, event.verb
            with self._lock:
                self._counts[kind] = self._counts.get(kind, Count()).with_one(event.record)

    def counts(self) -> dict[tuple[str, str], Count]:
        """Return the counts by (group, verb)."""
        with self._lock:
            return dict(self._counts)
