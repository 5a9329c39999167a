"""Last words: tell in words what a rank did last in a group, for a rank that waits too long.

A reader of its own beside the ring: a rank that waits for a named operation goes on agreeing, call after call, which
would push what matters out of the ring within a minute.
"""

from __future__ import annotations

from collections import deque
from time import monotonic_ns

from commlib.observe.recorder import Event, Phase, Record

# Operations that are told of, and kept: those that wait in a queue come twice.
_TOLD, _KEPT = 4, 16

_STARTS = (Phase.QUEUED, Phase.BEGUN, Phase.RUN)


class LastWords:
    """A reader of the recorder. It keeps the last operations of each group, named ones apart from its calls."""

    def __init__(self) -> None:
        self._latest: dict[tuple[str, bool], deque[Record]] = {}

    def read(self, event: Event) -> None:
        """Keep an operation that waits or runs."""
        if event.phase in _STARTS:
            record = event.record
            kind = record.group, bool(record.name)
            latest = self._latest.get(kind)
            if latest is None:
                latest = self._latest.setdefault(kind, deque(maxlen=_KEPT))
            latest.append(record)

    def tell(self, group: str, *, named: bool = False) -> str:
        """Return the last operations of a group, to be appended to a message; "" if there are none.

        Oldest first, by what happened to them last.
        """
        records = {record.number: record for record in list(self._latest.get((group, named), ()))}
        told = sorted(records.values(), key=_when)[-_TOLD:]
        now = monotonic_ns()
        words = "; ".join(f"{record!r} {_what(record)} {(now - _when(record)) / 1e9:.1f} s ago" for record in told)
        return f"; last on this rank: {words}" if words else ""


def _when(record: Record) -> int:
    return max(record.queued, record.began, record.posted, record.ended)


def _what(record: Record) -> str:
    if record.ended:
        return f"failed ({record.error.partition(':')[0]})" if record.error else "ended"
    if record.posted:
        return f"{record.detail},"
    return "begun" if record.began else "queued"
