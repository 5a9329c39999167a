"""What a rank did last in a group, in words for who waits too long."""

from __future__ import annotations

from time import monotonic_ns

from commlib.observe.recorder import Event, Phase, Recorder

_MOST = 4


def did_last(recorder: Recorder | None, group: str) -> str:
    """Return the last operations of a group in words, oldest first, to be appended to a message; "" if none are kept.

    Of each operation the last of its events is told, and how long ago that was.
    """
    if recorder is None:
        return ""
    latest: dict[int, Event] = {}
    for event in recorder.events(group):
        if event.phase is not Phase.MARK:
            latest.pop(event.record.number, None)
            latest[event.record.number] = event
    if not latest:
        return ""
    now = monotonic_ns()
    return "; last on this rank: " + "; ".join(_told(event, now) for event in list(latest.values())[-_MOST:])


def _told(event: Event, now: int) -> str:
    ago = f"{(now - event.time) / 1e9:.1f} s ago"
    record = event.record
    if event.phase is Phase.END:
        how = f"failed {ago} ({record.error.partition(':')[0]})" if record.error else f"ended {ago}"
    elif event.phase is Phase.ROUND:
        how = f"{event.detail}, {ago}"
    else:
        how = f"{_WORDS[event.phase]} {ago}"
    return f"{record!r} {how}"


_WORDS = {Phase.QUEUED: "queued", Phase.BEGUN: "begun", Phase.RUN: "run"}
