"""Reporting: give users of an optimizer, a module or a tape the statistics of its reductions."""

from __future__ import annotations

from typing import Any

from commlib.data_parallel.report import Statistics, StepReport


class Reporting:
    """Forwards the reports of `reducer`: a GradientReducer or NamedGradients, or None if nothing is reduced."""

    @property
    def reducer(self) -> Any:
        """The reducer of the gradients, with its buckets, options and compression."""
        raise NotImplementedError

    @property
    def report(self) -> StepReport | None:
        """Costs of communication in the last step; None before the first step."""
        found: StepReport | None = self.reducer.report
        return found

    @property
    def statistics(self) -> Statistics:
        """Totals of the reductions so far, and their cost."""
        found: Statistics = Statistics() if self.reducer is None else self.reducer.statistics
        return found

    @property
    def exposed_seconds(self) -> float:
        """Seconds that the training thread has waited for communication so far."""
        return self.statistics.exposed_seconds

    @property
    def compression_choice(self) -> str:
        """The compression of gradients, and the reason for its choice."""
        found: str = self.reducer.compression_choice
        return found
