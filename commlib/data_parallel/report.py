"""Report: count what reductions cost since the start, and tell it apart by training step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any


@dataclass(slots=True)
class Statistics:
    """Count what was reduced so far, and what it cost the thread that trains."""

    exposed_seconds: float = 0.0
    """Time the training thread waited for, or worked for, reductions: what overlap could not hide."""
    hidden_seconds: float = 0.0
    """Time in which reductions ran on the progress thread without being waited for."""
    nbytes: int = 0
    """Bytes of gradients (padding and flags included) that this rank put into reductions."""
    sent_bytes: int = 0
    """Bytes that this rank's reductions hand to other ranks, over a network or in shared memory."""
    uncompressed_bytes: int = 0
    """What `sent_bytes` would be if gradients travelled in their own dtypes, uncompressed."""
    reductions: int = 0
    """How often all buckets were reduced."""
    early_launches: int = 0
    """Buckets that were launched while backward was still running."""

    def count(self, sent: int, uncompressed: int) -> None:
        """Count bytes that a reduction sent, and would have sent uncompressed."""
        self.sent_bytes += sent
        self.uncompressed_bytes += uncompressed

    def hide(self, works: Iterable[Any], waited: float) -> None:
        """Count how long works ran, all of which are done, but for the seconds that they were waited for."""
        ran = sum(getattr(work, "seconds", 0.0) for work in works)
        self.hidden_seconds += max(0.0, ran - waited)

    @contextmanager
    def exposing(self) -> Iterator[None]:
        """Count the time within as exposed, once, also where parts of it count themselves."""
        before, started = self.exposed_seconds, time.perf_counter()
        try:
            yield
        finally:
            self.exposed_seconds = before + time.perf_counter() - started


@dataclass(frozen=True, slots=True)
class StepReport:
    """One training step on one rank.

    An all-reduce of n bytes over P ranks counts as 2 (P - 1) / P n bytes sent, whatever the algorithm, and also where
    ranks share memory: it is the least that a rank has to send, and makes compression comparable.
    """

    step: int
    """Number of the step, from 1."""
    seconds: float
    """Since the step before it, or since the optimizer was wrapped."""
    compute_seconds: float
    """What is left of `seconds`: forward, backward, the optimizer and whatever else the training thread did."""
    exposed_seconds: float
    """In which the training thread waited for, or worked for, reductions."""
    hidden_seconds: float
    """In which reductions ran while the training thread did not wait for them."""
    sent_bytes: int
    uncompressed_bytes: int


class StepClock:
    """Cuts what is counted into steps. `clock` gives seconds."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._started = clock()
        self._before = Statistics()
        self._steps = 0

    def step(self, now: Statistics) -> StepReport:
        """Return the report of the step that ends here."""
        started, before = self._started, self._before
        self._started, self._before = self._clock(), replace(now)
        self._steps += 1
        seconds = self._started - started
        exposed = now.exposed_seconds - before.exposed_seconds
        return StepReport(
            self._steps,
            seconds,
            max(0.0, seconds - exposed),
            exposed,
            now.hidden_seconds - before.hidden_seconds,
            now.sent_bytes - before.sent_bytes,
            now.uncompressed_bytes - before.uncompressed_bytes,
        )


def all_reduce_bytes(size: int, nbytes: int) -> int:
    """Return what one of `size` ranks sends in an all-reduce of `nbytes`: 2 (P - 1) / P of it."""
    return 2 * (size - 1) * nbytes // size
