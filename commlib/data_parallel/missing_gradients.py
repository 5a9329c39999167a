"""MissingGradients: agree on gradients that ranks lack, where all of them must lack the same ones."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from commlib.comparison.parameter_check import GatherRanks, check_missing
from commlib.data_parallel.options import Gradient
from commlib.data_parallel.values import Values


class MissingGradients:
    """The gradients without a value on this rank, or on any rank.

    Ranks exchange what they lack only if some rank `objects` to a reduction, which a flag in the buckets shows.
    """

    def __init__(self, ranks: GatherRanks, gradients: Sequence[Gradient], values: Values) -> None:
        self._ranks, self._gradients, self._values = ranks, gradients, values
        self._lacking = self._agreed = frozenset[int]()
        self._absent: list[int] = []
        """Gradients that no rank had in the last reduction."""
        self.late_name = ""
        """The gradient that made the reduction in progress necessary: it was set after the reduction of its step."""
        self.gives_up = False
        """The backward in progress raised. Other ranks learn of it where they wait for the end of the backward."""

    def objects(self, unused: Collection[int], strict: bool | Collection[int]) -> bool:
        """Return whether ranks must exchange what they lack, because this one does not lack what they agreed on.

        unused: gradients without a value. strict: those that all ranks must have: see `GradientReducer.end`.
        """
        if strict is False:
            self._lacking = frozenset()
        else:
            watched = range(len(self._gradients)) if strict is True else strict
            self._lacking = frozenset(index for index in unused if index in watched)
        return self.gives_up or bool(self.late_name) or self._lacking != self._agreed

    def check(self, *, has_joined: bool = False) -> bool:
        """Exchange what ranks lack; return whether the backward is valid. Collective.

        Raises MismatchError as `check_missing` does.
        """
        names = [gradient.name for gradient in self._gradients]
        lacking = None if has_joined else self._lacking
        if not check_missing(self._ranks, names, lacking, gave_up=self.gives_up, late=self.late_name):
            return False
        if lacking is not None:
            self._agreed = lacking
        return True

    def note_absent(self, unused: Collection[int]) -> None:
        """Record a reduction: of the `unused` gradients, no rank had those without a value now."""
        self._absent = [index for index in unused if index < len(self._gradients) and not self._values.exists(index)]

    def late(self) -> list[int]:
        """Return the gradients that exist now, but that no rank had in the last reduction."""
        return [index for index in self._absent if self._values.exists(index)]
