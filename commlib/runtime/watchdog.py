"""Watchdog: look around during a long wait, and say which rank is late, on what."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import Protocol

from commlib.errors import PeerError, ShutdownError, StallError
from commlib.runtime.process import Runtime

log = logging.getLogger("commlib")

# A peer that left may have sent what we wait for just before; a dead one cannot send any more.
_GRACE = 0.5

_LONG = 1.0


class Presence(Protocol):
    """Tell of the other ranks without asking them."""

    def absent(self) -> Mapping[int, str]:
        """Return the ranks that will never come, each with the reason."""
        ...

    def late(self) -> list[int]:
        """Return the ranks that have not come to where this rank waits."""
        ...


class StallCheck(Protocol):
    """Ask the other ranks what they wait for."""

    def look(self) -> None:
        """Tell the other ranks that this one waits. Raises MismatchError if one of them made another call."""
        ...

    def absent(self) -> Mapping[int, str]:
        """Return the ranks that have said that they will never come, each with the reason."""
        ...

    def late(self) -> list[int]:
        """Return the ranks that have not said that they wait too."""
        ...


class Watchdog:
    """The `on_wait` callback of one wait. Raises PeerError, StallError or ShutdownError to end it.

    `peers` are the ranks that are waited for (default: all). `stall_check` compares calls once a wait is long, where
    ranks do not share memory. `explain` words the warning about it: from seconds and late ranks; errors
    carry who was missing. `did_last` says what this rank did before, or "". `group` is the key of the group that waits.

    Whoever explains a hang finds it in `Runtime.waits` once the wait lasts, and reads: text, group, peers, thread (its
    identifier), since and looked (`time.monotonic` of its begin and of its last look).
    """

    __slots__ = (
        "__weakref__",
        "_absent_since",
        "_did_last",
        "_explain",
        "_long",
        "_next_look",
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
        presence: Presence | None,
        rank: int,
        text: str,
        peers: Collection[int] | None = None,
        stall_check: StallCheck | None = None,
        *,
        explain: Callable[[float, list[int]], str] | None = None,
        did_last: Callable[[], str] = str,
        group: str = "",
    ) -> None:
        self._runtime, self._presence, self._rank, self.text = runtime, presence, rank, text
        self.peers, self._stall_check, self._explain = peers, stall_check, explain
        self._did_last, self.group = did_last, group
        # Sooner where a message is due sooner: it names the ranks that have not come.
        limits = [runtime.config.timeout or _LONG, runtime.config.stall_warning or _LONG]
        self._long = min(_LONG, *(limit / 2 for limit in limits))
        self.since = self.looked = time.monotonic()
        self._next_look = self.since + 0.05
        self.thread = 0  # until it has looked
        self._absent_since = 0.0
        self._warned = False

    def __call__(self) -> None:
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look, self.looked = now + 0.1, now
        if not self.thread:
            self.thread = threading.get_ident()
            self._runtime.waits[id(self)] = self
        waited = now - self.since
        if self._runtime.closing:
            raise ShutdownError(f"{self.text}: rank {self._rank}: given up, because commlib is shutting down")
        if self._stall_check is not None and waited > self._long:
            self._stall_check.look()
        self._look_for_absent(now)
        if 0 < self._runtime.config.timeout < waited:
            late = self._late()
            error = StallError(
                f"{self.text}: rank {self._rank}: gave up after {waited:.1f} s (COMMLIB_TIMEOUT){_named(late)}; "
                f"look at what the late ranks are doing{self._did_last()}"
            )
            error.missing = dict.fromkeys(late, "")
            raise error
        if not self._warned and self._runtime.config.stall_warning < waited:
            self._warned = True
            late = self._late()
            if self._explain is not None:
                log.warning("%s%s", self._explain(waited, late), self._did_last())
            else:
                said = f"{_named(late)}{self._did_last()}"
                log.warning("%s: rank %d has waited %.0f s%s", self.text, self._rank, waited, said)

    def _look_for_absent(self, now: float) -> None:
        gone = {**_absent(self._stall_check), **_absent(self._presence)}
        absent = {rank: reason for rank, reason in gone.items() if self.peers is None or rank in self.peers}
        if not absent:
            return
        if not self._absent_since:
            self._absent_since = now
        elif now - self._absent_since > _GRACE:
            who = "; ".join(f"rank {rank} {reason}" for rank, reason in absent.items())
            error = PeerError(f"{self.text}: rank {self._rank}: waited for a rank that will not come: {who}")
            error.missing = absent
            raise error

    def _late(self) -> list[int]:
        here = self._presence.late() if self._presence is not None else []
        elsewhere = self._stall_check.late() if self._stall_check is not None else []
        return sorted({*here, *elsewhere})


def _absent(known: Presence | StallCheck | None) -> Mapping[int, str]:
    return {} if known is None else known.absent()


def _named(late: list[int]) -> str:
    return f"; not there yet: rank {', '.join(map(str, late))}" if late else ""
