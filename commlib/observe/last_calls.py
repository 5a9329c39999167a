"""Last calls: list the latest operations of a group on this rank, for the message of a rank that waits too long.

It has its own storage because a rank that waits for a named operation keeps negotiating, call after call. That would
push the interesting events out of the ring within a minute.
"""

from __future__ import annotations

from collections import deque
from time import monotonic_ns

from commlib.observe.recorder import Event, Phase, Record

# Operations reported, and kept: a queued operation is added twice.
_REPORTED, _STORED = 4, 16

_STARTS = (Phase.QUEUED, Phase.BEGUN, Phase.RUN)


class LastCalls:
    """A reader of the recorder. It keeps the last operations of each group, named operations separate from calls."""

    def __init__(self) -> None:
        self._latest: dict[tuple[str, bool], deque[Record]] = {}

    def read(self, event: Event) -> None:
        """Keep an operation that is queued or starts."""
        if event.phase in _STARTS:
            record = event.record
            kind = record.group, bool(record.name)
            latest = self._latest.get(kind)
            if latest is None:
                latest = self._latest.setdefault(kind, deque(maxlen=_STORED))
            latest.append(record)

    def describe(self, group: str, *, named: bool = False) -> str:
        """Return the last operations of a group as a suffix for a message; "" if there are none.

        They are ordered by their latest event, oldest first.
        """
        records = {record.number: record for record in list(self._latest.get((group, named), ()))}
        reported = sorted(records.values(), key=_last_time)[-_REPORTED:]
        now = monotonic_ns()
        words = "; ".join(
            f"{record!r} {_describe_state(record)} {(now - _last_time(record)) / 1e9:.1f} s ago" for record in reported
        )
        return f"; last on this rank: {words}" if words else ""


def _last_time(record: Record) -> int:
    return max(record.queued, record.began, record.posted, record.ended)


def _describe_state(record: Record) -> str:
    if record.ended:
        return f"failed ({record.error.partition(':')[0]})" if record.error else "ended"
    if record.posted:
        return f"{record.detail},"
    return "begun" if record.began else "queued"
