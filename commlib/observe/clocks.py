"""Clocks: detect ranks that share a clock, and measure the offset between clocks of different machines.

A timeline uses the kernel's monotonic clock, which all processes of a machine share. Clocks of two machines are
compared by round trips: the fastest of several gives the tightest bound (Cristian 1989; NTP does the same).
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic_ns, time_ns
from typing import Any, Protocol

import numpy as np

# Round trips for one comparison: enough that at least one is not delayed by a scheduler.
PINGS = 24

_TRIES = 5

_TAG = 32767  # of these messages: the largest tag that MPI guarantees


@dataclass(frozen=True, slots=True)
class Offset:
    """How far the clock of rank `to` was ahead of this rank's, at `time` of this rank's. Units: ns.

    error: a strict bound on the error of `offset`, whatever the delays of the messages.
    """

    time: int
    offset: int
    error: int
    to: int


class ClockRanks(Protocol):
    """Messages between two ranks. A Communicator implements it."""

    @property
    def rank(self) -> int: ...

    def send(self, x: Any, peer: int, tag: int = 0) -> Any: ...

    def recv(self, out: Any, peer: int, tag: int = 0) -> Any: ...


class ClockSink(Protocol):
    """A timeline that records clock offsets."""

    def note_clock(self, offset: Offset) -> None: ...


def clock_id() -> str:
    """Return a text that is equal in two processes if they read the same monotonic clock.

    It contains the kernel's boot ID and the offsets that a time namespace adds.
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

    It returns the fastest of several tries, because this process may lose its core during one.
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
    comm: ClockRanks, clocks: Mapping[int, str], *, now: Callable[[], int] = monotonic_ns, pings: int = PINGS
) -> Offset:
    """Return how far the clock of the lowest rank is ahead of this rank's. Collective over the ranks in `clocks`.

    clocks: the `clock_id` of each participating rank, including this one. Of the ranks that share a clock, only the
    lowest sends pings. Raises the errors of the messages.
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
        estimate = _ping(comm, root, now, pings)
        for rank in followers:
            comm.send(np.array([estimate.time, estimate.offset, estimate.error], np.int64), rank, _TAG)
        return estimate
    received = np.empty(3, np.int64)
    comm.recv(received, mine, _TAG)
    return Offset(int(received[0]), int(received[1]), int(received[2]), root)


def note_clock(timeline: ClockSink | None, comm: ClockRanks, clocks: Mapping[int, str]) -> None:
    """Record in the timeline how far this rank's clock is ahead of the lowest rank's of `clocks`, if they differ.

    Collective over the ranks in `clocks`, like `compare_clocks`; a rank without a timeline participates.
    """
    if len(set(clocks.values())) > 1:
        offset = compare_clocks(comm, clocks)
        if timeline is not None:
            timeline.note_clock(offset)


def _answer(comm: ClockRanks, peer: int, now: Callable[[], int], pings: int) -> None:
    message = np.zeros(1, np.int64)
    for _ in range(pings):
        comm.recv(message, peer, _TAG)
        message[0] = now()
        comm.send(message, peer, _TAG)


def _ping(comm: ClockRanks, root: int, now: Callable[[], int], pings: int) -> Offset:
    message = np.zeros(1, np.int64)
    samples: list[tuple[int, int, int]] = []
    for _ in range(pings):
        send_time = now()
        comm.send(message, root, _TAG)
        comm.recv(message, root, _TAG)
        back = now()
        samples.append((back - send_time, (send_time + back) // 2, int(message[0])))
    return _best(samples, root)


def _best(samples: Sequence[tuple[int, int, int]], root: int) -> Offset:
    took, middle, theirs = min(samples)
    return Offset(middle, theirs - middle, took // 2 + 1, root)
