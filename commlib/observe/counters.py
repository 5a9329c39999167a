"""Counters: how often each verb was called in each group, on how many bytes, and how long that took."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from commlib.observe.recorder import Event, Phase


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


class Counters:
    """A reader of the recorder."""

    def __init__(self) -> None:
        # Calls, failed ones, bytes, ns, ns in the queue: a list is changed in a tenth of the time of a new Count.
        self._sums: dict[tuple[str, str], list[int]] = {}
        self._lock = threading.RLock()  # a signal handler may come here in the middle of `read`

    def read(self, event: Event) -> None:
        """Count an operation that has ended."""
        if event.phase is not Phase.END:
            return
        record = event.record
        began = record.began or record.ended  # it has not come to its turn
        with self._lock:
            sums = self._sums.setdefault((record.group, record.verb), [0, 0, 0, 0, 0])
            sums[0] += 1
            sums[1] += bool(record.error)
            sums[2] += max(record.nbytes, 0)
            sums[3] += record.ended - began
            sums[4] += began - record.queued if record.queued else 0

    def counts(self) -> dict[tuple[str, str], Count]:
        """Return the counts by (group, verb)."""
        with self._lock:
            return {
                kind: Count(n, bad, size, ns / 1e9, queued / 1e9)
                for kind, (n, bad, size, ns, queued) in self._sums.items()
            }
