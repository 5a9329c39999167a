"""Reports: measure the costs of reductions, in total and per training step, and give them to users."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any


@dataclass(slots=True)
class Statistics:
    """Totals of the reductions so far, and their cost to the training thread."""

    exposed_seconds: float = 0.0
    """Time that the training thread waited for reductions or worked on them, because overlap could not hide it."""
    hidden_seconds: float = 0.0
    """Time in which reductions ran on the progress thread while no thread waited for them."""
    nbytes: int = 0
    """Bytes of gradients (padding and flags included) that this rank put into reductions."""
    sent_bytes: int = 0
    """Bytes that this rank's reductions pass to other ranks, over a network or in shared memory."""
    uncompressed_bytes: int = 0
    """The value of `sent_bytes` if gradients travelled uncompressed, in their own dtypes."""
    reductions: int = 0
    """Number of reductions of all buckets."""
    early_launches: int = 0
    """Number of buckets that were launched while backward was still running."""

    def count(self, sent: int, uncompressed: int) -> None:
        """Add the bytes that a reduction sent, and those that it would have sent uncompressed."""
        self.sent_bytes += sent
        self.uncompressed_bytes += uncompressed

    def hide(self, works: Iterable[Any], waited: float) -> None:
        """Add the run time of finished works, minus the seconds that a thread waited for them."""
        ran = sum(getattr(work, "seconds", 0.0) for work in works)
        self.hidden_seconds += max(0.0, ran - waited)

    @contextmanager
    def exposing(self) -> Iterator[None]:
        """Count the time within the context as exposed, once, even if calls within it count their own."""
        before, started = self.exposed_seconds, time.perf_counter()
        try:
            yield
        finally:
            self.exposed_seconds = before + time.perf_counter() - started


@dataclass(frozen=True, slots=True)
class StepReport:
    """The costs of one training step on one rank.

    An all-reduce of n bytes over P ranks counts as 2 (P - 1) / P n bytes sent, for every algorithm, and also in shared
    memory. A rank cannot send less, so compression schemes can be compared.
    """

    step: int
    """Step number, from 1."""
    seconds: float
    """Time since the previous step, or since the optimizer was wrapped."""
    compute_seconds: float
    """`seconds` minus `exposed_seconds`: forward, backward, the optimizer and other work of the training thread."""
    exposed_seconds: float
    """Time that the training thread waited for reductions or worked on them."""
    hidden_seconds: float
    """Time in which reductions ran while the training thread did not wait for them."""
    sent_bytes: int
    uncompressed_bytes: int


class StepClock:
    """Splits the statistics by training step. `clock` returns seconds."""

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
    """Return the bytes that one of `size` ranks sends in an all-reduce of `nbytes`: 2 (P - 1) / P times `nbytes`."""
    return 2 * (size - 1) * nbytes // size


class Reporting:
    """Base of an optimizer, a module or a tape: forwards the reports of its `reducer`.

    `reducer`: a GradientReducer or NamedGradients, or None if nothing is reduced.
    """

    @property
    def reducer(self) -> Any:
        """The reducer of the gradients, with its buckets, options and compression."""
        raise NotImplementedError

    @property
    def report(self) -> StepReport | None:
        """Costs of communication in the last step; None before the first step."""
        result: StepReport | None = self.reducer.report
        return result

    @property
    def statistics(self) -> Statistics:
        """Totals of the reductions so far, and their cost."""
        result: Statistics = Statistics() if self.reducer is None else self.reducer.statistics
        return result

    @property
    def exposed_seconds(self) -> float:
        """Seconds that the training thread has waited for communication so far."""
        return self.statistics.exposed_seconds

    @property
    def compression_choice(self) -> str:
        """The compression of gradients, and the reason for its choice."""
        result: str = self.reducer.compression_choice
        return result
