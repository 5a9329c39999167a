"""Stopwatch: measure times that are equal on all ranks, within a budget that rank 0 keeps."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from commlib.communicator import Communicator

TimedCall = Callable[[], Any]
MOST_REPETITIONS = 500


class Stopwatch:
    """Measures calls that all ranks of `comm` make together (or some of them, while the others wait).

    Every rank gets the same numbers, so every rank decides alike; only the clock of rank 0 ends the budget.
    """

    def __init__(self, comm: Communicator, seconds: float) -> None:
        self._comm = comm
        self._seconds = seconds
        self._end = time.perf_counter() + seconds

    @property
    def remaining(self) -> float:
        """The seconds left on rank 0's clock. Collective."""
        return float(self._comm.broadcast_object(self._end - time.perf_counter()))

    @property
    def done(self) -> float:
        """The fraction of the budget that has been spent, on this rank's clock."""
        return min(1.0, max(0.0, 1 - (self._end - time.perf_counter()) / self._seconds))

    def times(self, call: TimedCall | None, repetitions: int) -> list[float]:
        """Return the slowest rank's seconds for each repetition. Each starts after a barrier. Collective.

        call: None on a rank that does not participate.
        """
        spent = np.zeros(repetitions)
        for index in range(repetitions):
            self._comm.barrier()
            if call is not None:
                start = time.perf_counter()
                call()
                spent[index] = time.perf_counter() - start
        return list(map(float, self._comm.all_reduce(spent, "max")))

    def measure(self, call: TimedCall | None, share: float) -> list[float]:
        """Return the times of a call, repeated for `share` seconds within the budget. Collective.

        The call runs at least twice, and at least one time is returned.
        """
        begun = self.remaining
        end = begun - min(share, begun)  # of the budget
        self.times(call, 1)  # sets up buffers, connections and programs
        before = self.remaining
        times = self.times(call, 1)
        while len(times) < MOST_REPETITIONS and (left := self.remaining) > end:
            each = (before - left) / len(times)
            # Not all at once: the first call may have been faster than the later ones.
            repetitions = min(int((left - end) / max(each, 1e-9)), 2 * len(times), MOST_REPETITIONS - len(times))
            if repetitions < 1:
                break
            times += self.times(call, repetitions)
        return times
