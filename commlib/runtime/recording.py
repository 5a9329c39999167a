"""Recording: tell whether the operations of this process are recorded, and for which readers."""

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
from commlib.observe.last_words import LastWords
from commlib.observe.recorder import CAPACITY, Event, Recorder
from commlib.observe.timeline import Timeline
from commlib.runtime.progress import Progress

log = logging.getLogger("commlib")


class Recording:
    """On while the user has asked for it, or while a timeline is written, or while calls are counted.

    Off, a call costs nothing more.

    recorder: where events go; None while it is off. What was recorded last can be asked for until it is on again.
    """

    def __init__(self) -> None:
        self.recorder: Recorder | None = None
        self.timeline: Timeline | None = None
        self._asked_for = self._counting = False
        self._last: tuple[Recorder, Counters] | None = None
        self._last_words = LastWords()
        self._groups: weakref.WeakSet[Progress] = weakref.WeakSet()
        self._lock = threading.Lock()

    def add(self, progress: Progress) -> None:
        """Record the operations of a group too, from now on."""
        with self._lock:
            self._groups.add(progress)
            if self.recorder is not None:
                progress.record(self.recorder)

    def start(self, events: int = CAPACITY) -> None:
        """Record operations from now on, and keep so many events. Raises UsageError if that was asked for already.

        A timeline that is being written goes on; what it has recorded so far is forgotten.
        """
        with self._lock:
            if self._asked_for:
                raise UsageError("start_recording: operations are being recorded already: call stop_recording first")
            if events < 1:
                raise UsageError(f"start_recording: events is {events}, expected at least 1")
            self._asked_for = True
            self._turn_on(events)

    def stop(self) -> None:
        """Record no more, unless a timeline is being written."""
        with self._lock:
            self._asked_for = False
            if self.timeline is None and not self._counting:
                self._turn_off()

    def start_counting(self) -> None:
        """Count operations from now on, to the end, whatever else is recorded meanwhile. Idempotent."""
        with self._lock:
            self._counting = True
            if self.recorder is None:
                self._turn_on(1)

    def start_timeline(self, path: str, rank: int, *, mark_cycles: bool = False) -> None:
        """Write a trace of all operations from now on, by rank 0, or by each rank where `{rank}` is in the path.

        Raises UsageError if one is being written, or if the file cannot be.
        """
        if rank and "{rank}" not in path:
            return
        with self._lock:
            if self.timeline is not None:
                raise UsageError("start_timeline: a timeline is being written already: call stop_timeline first")
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
            if not (self._asked_for or self._counting):
                self._turn_off()
        timeline.close()

    def start_as_set(self, config: Config, rank: int) -> None:
        """Do what the settings ask for. Raises UsageError for a timeline that cannot be written."""
        if config.events:
            self.start(config.events)
        if config.timeline:
            self.start_timeline(config.timeline, rank)

    def clock_of_own(self, config: Config) -> str:
        """Return which clock times are of, if each rank writes a timeline as settings ask for; else ""."""
        return clock_id() if self.timeline is not None and "{rank}" in config.timeline else ""

    def compare_clocks(self, comm: Any, clocks: Mapping[int, str]) -> None:
        """Write into the timeline how far the clocks of ranks are apart. Collective over the ranks in `clocks`."""
        if comm.rank in clocks:
            note_clock(self.timeline, comm, clocks)

    def events(self) -> list[Event]:
        """Return what was recorded last, oldest first; nothing if nothing ever was."""
        return [] if self._last is None else self._last[0].events()

    def counters(self) -> Counters:
        """Return what was counted since recording was started. Raises UsageError if it never was."""
        if self._last is None:
            raise UsageError(
                "statistics: nothing was recorded: set COMMLIB_EVENTS to how many events to keep, or call "
                "commlib.start_recording() or commlib.metrics.start() before"
            )
        return self._last[1]

    def did_last(self, group: str, *, named: bool = False) -> str:
        """Return what this rank did last in a group, to be appended to a message; "" if nothing is recorded.

        named: what named operations did, and not the calls. All that is recorded goes to the log, at debug.
        """
        if self.recorder is None:
            return ""
        if log.isEnabledFor(logging.DEBUG):
            log.debug("%s: recorded on this rank:\n%s", group, "\n".join(map(str, self.recorder.events())))
        return self._last_words.tell(group, named=named)

    def close(self) -> None:
        """Record no more, and finish the trace."""
        self._counting = False
        self.stop_timeline()
        self.stop()

    def abandon(self) -> None:
        """Write nothing more, in a forked child."""
        self._lock = threading.Lock()
        timeline, self.timeline = self.timeline, None
        self.recorder = None
        if timeline is not None:
            timeline.abandon()

    def _turn_on(self, events: int) -> None:
        recorder, counters, self._last_words = Recorder(events), self._kept_counters(), LastWords()
        recorder.subscribe(counters.read)
        recorder.exposed = counters.expose
        recorder.subscribe(self._last_words.read)
        self._last = recorder, counters
        self._read_timeline(recorder)
        self.recorder = recorder
        for progress in list(self._groups):
            progress.record(recorder)

    def _kept_counters(self) -> Counters:
        """Return those that go on while calls are counted, else new ones."""
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
