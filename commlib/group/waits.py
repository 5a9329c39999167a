"""Waits: watch a group's waits for other ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection
from time import monotonic

from commlib.group.call_check import StallCheck
from commlib.group.group_status import GroupStatus, Liveness
from commlib.runtime.process import Runtime
from commlib.runtime.watchdog import Watchdog
from commlib.transport.base import WaitHook


class Waits:
    """The waits of one group. It holds no group, so any part of a group may hold it.

    key: the group's key. liveness: of the other ranks, from the board of the group or of its parent; None without one.
    stall_check: compares the calls in long waits; None: the ranks do not compare them.
    """

    def __init__(
        self, runtime: Runtime, status: GroupStatus, key: str, liveness: Liveness | None, stall_check: StallCheck | None
    ) -> None:
        self._runtime, self._key, self._stall_check = runtime, key, stall_check
        self.status, self.name = status, status.name
        self.liveness = liveness
        self.purpose = ""
        """The purpose of the group's calls, if only one internal user makes calls there; part of the texts of waits."""
        self.explain: Callable[[float, list[int]], str] | None = None
        """Formats the warning about a long wait for a group with internal calls only: see `Group.speak_for`."""

    def watch(self, text: str, peers: Collection[int] | None = None) -> Watchdog:
        """Return the watchdog for one wait: for `peers`, or for all ranks in a collective (None)."""
        status = self.status
        name = f"{self.name}: {self.purpose}" if self.purpose else self.name
        stall_check = self._stall_check if peers is None and not (status.is_open and status.one_node) else None
        return Watchdog(
            self._runtime,
            self.liveness,
            status.rank,
            f"{name}: {text}",
            peers,
            stall_check,
            explain=self.explain,
            last_calls=self.last_calls,
            group=self._key,
        )

    def watch_each(self, text: str) -> WaitHook:
        """Return a hook for many waits. It makes a new watchdog for each long wait; short waits need none."""
        return WaitSeries(self, text)

    def last_calls(self) -> str:
        """Return this rank's last calls in the group, as text to append to a message; "" if recording is off.

        Also "" for a group with internal calls only: its speaker reports them (`Group.speak_for`).
        """
        return "" if self.explain is not None else self._runtime.recording.last_calls(self.name)


class WaitSeries:
    """A hook for the waits of one operation, each with its own watchdog."""

    def __init__(self, waits: Waits, text: str) -> None:
        self._waits, self._text = waits, text
        self._watch: WaitHook | None = None
        self._call = 0
        self._last = 0.0

    def __call__(self) -> None:
        now, call = monotonic(), self._waits.status.call_number
        # Within one wait this is called about every 20 ms; a wait of the next call may start just as soon.
        if self._watch is None or call != self._call or now - self._last > 1.0:
            self._watch = self._waits.watch(self._text)
        self._last, self._call = now, call
        self._watch()
