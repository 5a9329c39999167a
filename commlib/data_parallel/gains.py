"""Gains: let a gradient that was already reduced count once when it is reduced again."""

from __future__ import annotations

from collections.abc import Sequence

from commlib.data_parallel.options import Gradient, Options
from commlib.data_parallel.reducer_ranks import ReducerRanks
from commlib.data_parallel.values import Values


class Gains:
    """The gradients that keep their value after a reduction, and whose reduction would scale it.

    The gain is the factor of a reduction for a value that is equal on all ranks: their number, for a sum.
    """

    def __init__(self, ranks: ReducerRanks, options: Options, gradients: Sequence[Gradient], values: Values) -> None:
        self._values = values
        self.factors: dict[int, float] = {}
        """The gains other than 1, by gradient."""
        self.results: set[int] = set()
        """Gradients with a gain that are results of a reduction. If a backward adds to one, it is first divided by its
        gain on each rank. The next reduction then counts the earlier result once."""
        if ranks.size == 1 or not values.accumulates:
            return
        for index, gradient in enumerate(gradients):
            gain = gradient.scale * (ranks.along(gradient.axis).size if options.op == "sum" else 1)
            if gain != 1:
                self.factors[index] = gain

    def divide(self, index: int) -> None:
        """Divide a result by its gain: something is about to be added to it."""
        self.results.discard(index)
        if self._values.exists(index):
            self._values.scale(index, 1 / self.factors[index])

    def note_results(self) -> None:
        """Record that all gradients are results of a reduction now."""
        self.results.update([index for index in self.factors if self._values.exists(index)])
