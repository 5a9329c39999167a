"""Reporting: tell users of an optimizer, a module or a tape what it has reduced, and what that cost."""

from __future__ import annotations

from typing import Any

from commlib.data_parallel.report import Statistics, StepReport


class Reporting:
    """Tells what `reducer` tells: a GradientReducer, or NamedGradients, or None where nothing is reduced."""

    @property
    def reducer(self) -> Any:
        """What reduces the gradients: its buckets, options and compression."""
        raise NotImplementedError

    @property
    def report(self) -> StepReport | None:
        """What communication cost in the last step; None before the first one."""
        found: StepReport | None = self.reducer.report
        return found

    @property
    def statistics(self) -> Statistics:
        """What was reduced so far, and what it cost."""
        found: Statistics = Statistics() if self.reducer is None else self.reducer.statistics
        return found

    @property
    def exposed_seconds(self) -> float:
        """Seconds that the training thread has waited for communication so far."""
        return self.statistics.exposed_seconds

    @property
    def compression_choice(self) -> str:
        """How gradients are compressed, and why so."""
        found: str = self.reducer.compression_choice
        return found
