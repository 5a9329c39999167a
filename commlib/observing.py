"""Observing: record, count and trace the operations of this process. Off by default."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from commlib.errors import UsageError
from commlib.world import world

if TYPE_CHECKING:
    from commlib.observe.counters import Count
    from commlib.observe.recorder import Event


def start_recording(events: int = 4096) -> None:
    """Record the operations that this rank launches from now on, and keep the last `events` events.

    An operation has two events or more. Errors and warnings about long waits then list this rank's last calls.

    Args:
        events: The number of events to keep; older ones are dropped.

    Raises:
        UsageError: If recording is on already; COMMLIB_EVENTS turns it on from the start.

    Examples:
        >>> commlib.start_recording()
        >>> total = comm.all_reduce(np.ones(2))
        >>> commlib.stop_recording()
        >>> len(commlib.recorded()) > 0
        True
    """
    world().runtime.recording.start(events)


def stop_recording() -> None:
    """Stop recording. The recorded events stay available until recording starts again."""
    world().runtime.recording.stop()


def recorded() -> list[Event]:
    """Return the last events of this rank, oldest first."""
    return world().runtime.recording.events()


def statistics() -> dict[tuple[str, str], Count]:
    """Return this rank's call counters by (group, verb), since recording or counting started.

    Raises:
        UsageError: If nothing was recorded.
    """
    return world().runtime.recording.counters().counts()


class timeline:
    """Write operations to a Chrome trace (chrome://tracing, Perfetto) until `stop` or the end of a `with` block.

        with commlib.timeline("run/trace{rank}.json"):
            train()

    With `{rank}` in the path each rank writes a separate file, and the call is collective: ranks on several machines
    compare their clocks by some messages, here and at the end of a `with` block that ends without an exception. Then
    `commlib trace merge` can merge the files. Without `{rank}` rank 0 writes its own operations, and any ranks may make
    this call. COMMLIB_TIMELINE turns it on from the start.

    Args:
        path: The file; `{rank}` in it becomes the number of the rank.
        mark_cycles: Also mark the cycles in which ranks agree on named operations.

    Raises:
        UsageError: If a trace is being written already, or cannot be written: with `{rank}` on all ranks, naming the
            failing ones.
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
            error = str(caught).removeprefix("timeline: ")
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
        """Finish the trace. Idempotent; not collective."""
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
    """Mark the end of a training step in the timeline, if one is written; `commlib trace summary` reports by step.

    Not needed if `DistributedOptimizer` reduces the gradients, or if the model is a pipeline.
    """
    world().group.progress.journal.step("user")
