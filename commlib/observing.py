"""Observing: record, count and trace the operations of this process. Off until it is asked for."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from commlib.errors import UsageError
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


class timeline:
    """Write what operations do, from now on, to a Chrome trace; until `stop`, or the end of a `with` block.

        with commlib.timeline("run/trace{rank}.json"):
            train()

    With `{rank}` in the path each rank writes a file of its own, and this is collective: ranks on several machines
    compare their clocks, by some messages now and again at the end of a `with` block that no exception left, so that
    `commlib trace merge` can put the files together. Else rank 0 writes what it sees, and any ranks may call this.
    `start_timeline` is the same without comparing clocks, and never collective; COMMLIB_TIMELINE does this from the
    start. mark_cycles: also say when ranks agree on named operations. Raises UsageError if a trace is being written, or
    cannot be: with `{rank}` on all ranks, naming those where.
    """

    def __init__(self, path: str, *, mark_cycles: bool = False) -> None:
        from commlib.observe.clocks import clock_id, note_clock

        comm, error = world(), ""
        self._recording = comm.runtime.recording
        self._comm = comm if "{rank}" in path and comm.size > 1 else None
        try:
            self._recording.start_timeline(path, comm.rank, mark_cycles=mark_cycles)
        except UsageError as caught:
            if self._comm is None:
                raise
            error = str(caught)
        self._written = self._recording.timeline
        if self._comm is not None:
            everyone = comm.all_gather_object((error, clock_id()))
            if bad := [f"rank {rank}: {text}" for rank, (text, _) in enumerate(everyone) if text]:
                if not error:
                    self.stop()
                raise UsageError(f"timeline: {'; '.join(bad)}")
            self._clocks = {rank: clock for rank, (_, clock) in enumerate(everyone)}
            note_clock(self._written, comm, self._clocks)

    def stop(self) -> None:
        """Finish the trace, unless it is finished. Not collective."""
        if self._written is not None and self._recording.timeline is self._written:
            self._recording.stop_timeline()

    def __enter__(self) -> timeline:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        from commlib.observe.clocks import note_clock

        if error is None and self._comm is not None:
            note_clock(self._written, self._comm, self._clocks)
        self.stop()


def mark_step() -> None:
    """Say in the timeline, if one is written, that a training step has ended: `commlib trace summary` looks at steps.

    Not needed where gradients are reduced by `DistributedOptimizer`, or a model is a pipeline.
    """
    world().group.journal.step("user")
