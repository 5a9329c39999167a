"""Watchdog: checks on the other ranks during a long wait, and reports the late ranks."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import Protocol

from commlib.errors import PeerError, ShutdownError, StallError
from commlib.runtime.process import Runtime

log = logging.getLogger("commlib")

# Seconds. A peer may have sent the awaited data just before it left.
_GRACE = 0.5

_LONG = 1.0


class PeerLiveness(Protocol):
    """The state of the other ranks as far as this rank can read it, without messages."""

    def absent(self) -> Mapping[int, str]:
        """Return the ranks that will never arrive, each with the reason."""
        ...

    def late(self) -> list[int]:
        """Return the ranks that have not arrived at this rank's current operation."""
        ...


class PeerCheck(Protocol):
    """Exchanges messages about calls with other ranks during a long wait."""

    def look(self) -> None:
        """Send the other ranks the call in which this one waits. Raises MismatchError if one made a different call."""
        ...

    def absent(self) -> Mapping[int, str]:
        """Return the ranks that have reported that they will never arrive, each with the reason."""
        ...

    def late(self) -> list[int]:
        """Return the ranks that have not reported that they wait too."""
        ...


class Watchdog:
    """The `on_wait` callback of one wait. Raises PeerError, StallError or ShutdownError to end it.

    `peers` are the awaited ranks (default: all). `stall_check` compares calls once a wait is long, if the ranks do not
    share memory. `explain` formats the warning from the seconds and the late ranks; errors list the missing ranks.
    `last_calls` returns this rank's last calls as text, or "". `group` is the key of the waiting group.

    Long waits are in `Runtime.waits`, where the diagnosis of hangs reads: text, group, peers, thread (its identifier),
    since and looked (`time.monotonic` of the start and of the last poll).
    """

    __slots__ = (
        "__weakref__",
        "_absent_since",
        "_did_last",
        "_explain",
        "_long",
        "_next_poll",
        "_presence",
        "_rank",
        "_runtime",
        "_stall_check",
        "_warned",
        "group",
        "looked",
        "peers",
        "since",
        "text",
        "thread",
    )

    def __init__(
        self,
        runtime: Runtime,
        presence: PeerLiveness | None,
        rank: int,
        text: str,
        peers: Collection[int] | None = None,
        stall_check: PeerCheck | None = None,
        *,
        explain: Callable[[float, list[int]], str] | None = None,
        last_calls: Callable[[], str] = str,
        group: str = "",
    ) -> None:
        self._runtime, self._presence, self._rank, self.text = runtime, presence, rank, text
        self.peers, self._stall_check, self._explain = peers, stall_check, explain
        self._did_last, self.group = last_calls, group
        # Earlier if a warning or error is due earlier, because it names the late ranks.
        limits = [runtime.config.timeout or _LONG, runtime.config.stall_warning or _LONG]
        self._long = min(_LONG, *(limit / 2 for limit in limits))
        self.since = self.looked = time.monotonic()
        self._next_poll = self.since + 0.05
        self.thread = 0  # until the first poll
        self._absent_since = 0.0
        self._warned = False

    def __call__(self) -> None:
        now = time.monotonic()
        if now < self._next_poll:
            return
        self._next_poll, self.looked = now + 0.1, now
        if not self.thread:
            self.thread = threading.get_ident()
            self._runtime.waits[id(self)] = self
        elapsed = now - self.since
        if self._runtime.closing:
            raise ShutdownError(f"{self.text}: rank {self._rank}: cancelled, because commlib is shutting down")
        if self._stall_check is not None and elapsed > self._long:
            self._stall_check.look()
        self._check_absent(now)
        if 0 < self._runtime.config.timeout < elapsed:
            late = self._late()
            error = StallError(
                f"{self.text}: rank {self._rank}: gave up after {elapsed:.1f} s (COMMLIB_TIMEOUT){_late_text(late)}; "
                f"look at what the late ranks are doing{self._did_last()}"
            )
            error.missing = dict.fromkeys(late, "")
            raise error
        if not self._warned and self._runtime.config.stall_warning < elapsed:
            self._warned = True
            late = self._late()
            if self._explain is not None:
                log.warning("%s%s%s", self._explain(elapsed, late), self._runtime.forecast(elapsed), self._did_last())
            else:
                suffix = f"{_late_text(late)}{self._runtime.forecast(elapsed)}{self._did_last()}"
                log.warning("%s: rank %d has waited %.0f s%s", self.text, self._rank, elapsed, suffix)

    def _check_absent(self, now: float) -> None:
        reasons = {**_absent(self._stall_check), **_absent(self._presence)}
        absent = {rank: reason for rank, reason in reasons.items() if self.peers is None or rank in self.peers}
        if not absent:
            return
        if not self._absent_since:
            self._absent_since = now
        elif now - self._absent_since > _GRACE:
            who = "; ".join(f"rank {rank} {reason}" for rank, reason in absent.items())
            error = PeerError(f"{self.text}: rank {self._rank}: waited for a rank that will never arrive: {who}")
            error.missing = absent
            raise error

    def _late(self) -> list[int]:
        here = self._presence.late() if self._presence is not None else []
        elsewhere = self._stall_check.late() if self._stall_check is not None else []
        return sorted({*here, *elsewhere})


def _absent(liveness: PeerLiveness | PeerCheck | None) -> Mapping[int, str]:
    return {} if liveness is None else liveness.absent()


def _late_text(late: list[int]) -> str:
    return f"; not arrived: rank {', '.join(map(str, late))}" if late else ""
