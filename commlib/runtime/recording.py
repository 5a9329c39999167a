"""Recording: turns the recording of this process's operations on and off, and connects its readers."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Mapping
from typing import Any

from commlib.config.settings import Config
from commlib.errors import UsageError
from commlib.observe.clocks import clock_id, note_clock
from commlib.observe.counters import Counters
from commlib.observe.last_calls import LastCalls
from commlib.observe.recorder import CAPACITY, Event, Recorder
from commlib.observe.timeline import Timeline
from commlib.runtime.progress import Progress

log = logging.getLogger("commlib")


class Recording:
    """The recording of operations: on while the user records, writes a timeline, or counts calls.

    While it is off, calls have no overhead.

    recorder: receives the events; None while recording is off. The last events stay available until it is on again.
    """

    def __init__(self) -> None:
        self.recorder: Recorder | None = None
        self.timeline: Timeline | None = None
        self._user_records = self._counting = False
        self._last: tuple[Recorder, Counters] | None = None
        self._last_words = LastCalls()
        self._groups: weakref.WeakSet[Progress] = weakref.WeakSet()  # weak: a dropped group is freed
        self._lock = threading.Lock()

    def add(self, progress: Progress) -> None:
        """Record the operations of a group too, from now on."""
        with self._lock:
            self._groups.add(progress)
            if self.recorder is not None:
                progress.record(self.recorder)

    def start(self, events: int = CAPACITY) -> None:
        """Record operations from now on, and keep the last `events` events. Raises UsageError if it is on already.

        A timeline that is being written continues; events recorded earlier are dropped.
        """
        with self._lock:
            if self._user_records:
                raise UsageError("start_recording: operations are being recorded already: call stop_recording first")
            if events < 1:
                raise UsageError(f"start_recording: events is {events}, expected at least 1")
            self._user_records = True
            self._turn_on(events)

    def stop(self) -> None:
        """Stop recording, unless a timeline is being written or calls are counted."""
        with self._lock:
            self._user_records = False
            if self.timeline is None and not self._counting:
                self._turn_off()

    def start_counting(self) -> None:
        """Count operations from now on until `close`, even if recording starts and stops meanwhile. Idempotent."""
        with self._lock:
            self._counting = True
            if self.recorder is None:
                self._turn_on(1)

    def start_timeline(self, path: str, rank: int, *, mark_cycles: bool = False) -> None:
        """Write a trace of all operations from now on, on rank 0, or on each rank if `{rank}` is in the path.

        Raises UsageError if a trace is being written already, or if the file cannot be written.
        """
        if rank and "{rank}" not in path:
            return
        with self._lock:
            if self.timeline is not None:
                raise UsageError(
                    "timeline: one is being written already: end its `with` block, or call its `stop`, first"
                )
            path = path.replace("{rank}", str(rank))
            self.timeline = Timeline(path, rank=rank, mark_cycles=mark_cycles)
            if self.recorder is None:
                self._turn_on(CAPACITY)
            else:
                self._read_timeline(self.recorder)

    def stop_timeline(self) -> None:
        """Finish the trace, if there is one."""
        with self._lock:
            timeline, self.timeline = self.timeline, None
            if timeline is None:
                return
            if self.recorder is not None:
                self.recorder.unsubscribe(timeline.read)
                self.recorder.trace = None
                self.recorder.marks_cycles = False
            if not (self._user_records or self._counting):
                self._turn_off()
        timeline.close()

    def start_from_settings(self, config: Config, rank: int) -> None:
        """Start recording and timeline as configured. Raises UsageError if the timeline cannot be written."""
        if config.events:
            self.start(config.events)
        if config.timeline:
            self.start_timeline(config.timeline, rank)

    def own_clock_id(self, config: Config) -> str:
        """Return this rank's clock id if the settings let each rank write a timeline; else ""."""
        return clock_id() if self.timeline is not None and "{rank}" in config.timeline else ""

    def compare_clocks(self, comm: Any, clocks: Mapping[int, str]) -> None:
        """Write the offsets of the ranks' clocks into the timeline. Collective over the ranks in `clocks`."""
        if comm.rank in clocks:
            note_clock(self.timeline, comm, clocks)

    def events(self) -> list[Event]:
        """Return the last recorded events, oldest first; empty if nothing was recorded."""
        return [] if self._last is None else self._last[0].events()

    def counters(self) -> Counters:
        """Return the counters since recording started. Raises UsageError if nothing was recorded."""
        if self._last is None:
            raise UsageError(
                "statistics: nothing was recorded: set COMMLIB_EVENTS to the number of events to keep, or first call "
                "commlib.start_recording() or commlib.metrics.start()"
            )
        return self._last[1]

    def last_calls(self, group: str, *, named: bool = False) -> str:
        """Return this rank's last calls in a group, as text to append to a message; "" if recording is off.

        named: report named operations instead of calls. All recorded events go to the log at level debug.
        """
        if self.recorder is None:
            return ""
        if log.isEnabledFor(logging.DEBUG):
            log.debug("%s: recorded on this rank:\n%s", group, "\n".join(map(str, self.recorder.events())))
        return self._last_words.describe(group, named=named)

    def close(self) -> None:
        """Stop recording, and finish the trace."""
        self._counting = False
        self.stop_timeline()
        self.stop()

    def abandon(self) -> None:
        """Stop writing in a forked child."""
        self._lock = threading.Lock()
        timeline, self.timeline = self.timeline, None
        self.recorder = None
        if timeline is not None:
            timeline.abandon()

    def _turn_on(self, events: int) -> None:
        recorder, counters, self._last_words = Recorder(events), self._current_counters(), LastCalls()
        recorder.subscribe(counters.read)
        recorder.exposed = counters.expose
        recorder.subscribe(self._last_words.read)
        self._last = recorder, counters
        self._read_timeline(recorder)
        self.recorder = recorder
        for progress in list(self._groups):
            progress.record(recorder)

    def _current_counters(self) -> Counters:
        """Return the current counters while calls are counted, else new ones."""
        return self._last[1] if self._counting and self._last is not None else Counters()

    def _turn_off(self) -> None:
        self.recorder = None
        for progress in list(self._groups):
            progress.record(None)

    def _read_timeline(self, recorder: Recorder) -> None:
        if self.timeline is not None:
            recorder.subscribe(self.timeline.read)
            recorder.trace = self.timeline.take
            recorder.marks_cycles = self.timeline.mark_cycles
