"""Observing: record, count and trace the operations of this process. Off until it is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from commlib.world import world

if TYPE_CHECKING:
    from commlib.observe.counters import Count
    from commlib.observe.recorder import Event


def start_recording(events: int = 4096) -> None:
    """Record operations that are launched from now on, on this rank, and keep the last so many events.

    An operation has two events or more. Errors and warnings about long waits then say what this rank did last.
    Raises UsageError if they are recorded already; COMMLIB_EVENTS does it from the start.
    """
    world().runtime.recording.start(events)


def stop_recording() -> None:
    """Record no more. What was recorded can be asked for until recording starts again."""
    world().runtime.recording.stop()


def recorded() -> list[Event]:
    """Return the last events of this rank, oldest first."""
    return world().runtime.recording.events()


def statistics() -> dict[tuple[str, str], Count]:
    """Return how often each verb was called in each group, by (group, verb), since recording was started.

    Raises UsageError if it never was.
    """
    return world().runtime.recording.counters().counts()


def start_timeline(path: str, *, mark_cycles: bool = False) -> None:
    """Write what operations do, from now on, to a Chrome trace (chrome://tracing, Perfetto).

    Rank 0 writes it, or each rank where `{rank}` stands in the path for its number. Not collective; other ranks may
    call it too. mark_cycles: also say when ranks agree on named operations. Raises UsageError if a trace is being
    written, or cannot be. COMMLIB_TIMELINE does it from the start.
    """
    comm = world()
    comm.runtime.recording.start_timeline(path, comm.rank, mark_cycles=mark_cycles)


def stop_timeline() -> None:
    """Finish the trace, if there is one."""
    world().runtime.recording.stop_timeline()
