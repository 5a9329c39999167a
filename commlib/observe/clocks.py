"""Clocks: whether two ranks read one clock, and how far apart their clocks are if not.

Times of a timeline are those of the kernel's monotonic clock, which all processes of a machine share. Clocks of two
machines are compared by messages there and back: the quickest of some says most (Cristian 1989; NTP does so, too).
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic_ns, time_ns
from typing import Any, Protocol

import numpy as np

# Messages there and back for one comparison: one of so many meets no scheduler.
PINGS = 24

_TRIES = 5

_TAG = 32767  # of these messages: the last one that there is


@dataclass(frozen=True, slots=True)
class Offset:
    """How far the clock of rank `to` was ahead of this rank's, at `time` of this rank's. Units: ns.

    error: it cannot be further from that, whatever the messages did.
    """

    time: int
    offset: int
    error: int
    to: int


class Comm(Protocol):
    """Messages between two ranks. A Communicator has them."""

    @property
    def rank(self) -> int: ...

    def send(self, x: Any, peer: int, tag: int = 0) -> Any: ...

    def recv(self, out: Any, peer: int, tag: int = 0) -> Any: ...


class Noting(Protocol):
    """A timeline."""

    def note_clock(self, offset: Offset) -> None: ...


def clock_id() -> str:
    """Return a text that processes have alike which read the same monotonic clock.

    The kernel's boot, and what a time namespace adds to its clock.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return f"host {host_name()}"
    try:
        words = Path("/proc/self/timens_offsets").read_text().split()
    except OSError:
        return boot
    return boot + "".join(f"+{word}" for word in words if word.strip("-").isdigit() and word != "0")


def now_on_both() -> tuple[int, int]:
    """Return the time of the monotonic clock and the time of day at one moment. Units: ns.

    Of some tries the quickest: in the middle of one this process may lose its core.
    """
    tries = []
    for _ in range(_TRIES):
        before, wall, after = monotonic_ns(), time_ns(), monotonic_ns()
        tries.append((after - before, (before + after) // 2, wall))
    _, monotonic, wall = min(tries)
    return monotonic, wall


def host_name() -> str:
    return platform.node()


def compare_clocks(
    comm: Comm, clocks: Mapping[int, str], *, now: Callable[[], int] = monotonic_ns, pings: int = PINGS
) -> Offset:
    """Return how far the clock of the lowest rank is ahead of this rank's. Collective over the ranks in `clocks`.

    clocks: what `clock_id` returns on each of the ranks that take part, this one among them. Ranks with one clock send
    no pings but for one of them. Raises what messages raise.
    """
    ranks = sorted(clocks)
    root = ranks[0]
    leaders: dict[str, int] = {}
    for rank in ranks:
        leaders.setdefault(clocks[rank], rank)
    mine = leaders[clocks[comm.rank]]
    if mine == root:
        if comm.rank == root:
            for leader in leaders.values():
                if leader != root:
                    _answer(comm, leader, now, pings)
        return Offset(now(), 0, 0, root)
    followers = [rank for rank in ranks if clocks[rank] == clocks[comm.rank] and rank != mine]
    if comm.rank == mine:
        found = _ping(comm, root, now, pings)
        for rank in followers:
            comm.send(np.array([found.time, found.offset, found.error], np.int64), rank, _TAG)
        return found
    told = np.empty(3, np.int64)
    comm.recv(told, mine, _TAG)
    return Offset(int(told[0]), int(told[1]), int(told[2]), root)


def note_clock(timeline: Noting | None, comm: Comm, clocks: Mapping[int, str]) -> None:
    """Write into a rank's timeline how far its clock is from that of the lowest of `clocks`, if they have several.

    Collective over the ranks in `clocks`, as `compare_clocks` is; a rank without a timeline takes part.
    """
    if len(set(clocks.values())) > 1:
        offset = compare_clocks(comm, clocks)
        if timeline is not None:
            timeline.note_clock(offset)


def _answer(comm: Comm, peer: int, now: Callable[[], int], pings: int) -> None:
    word = np.zeros(1, np.int64)
    for _ in range(pings):
        comm.recv(word, peer, _TAG)
        word[0] = now()
        comm.send(word, peer, _TAG)


def _ping(comm: Comm, root: int, now: Callable[[], int], pings: int) -> Offset:
    word = np.zeros(1, np.int64)
    found: list[tuple[int, int, int]] = []
    for _ in range(pings):
        sent = now()
        comm.send(word, root, _TAG)
        comm.recv(word, root, _TAG)
        back = now()
        found.append((back - sent, (sent + back) // 2, int(word[0])))
    return _best(found, root)


def _best(found: Sequence[tuple[int, int, int]], root: int) -> Offset:
    took, middle, theirs = min(found)
    return Offset(middle, theirs - middle, took // 2 + 1, root)
