"""Exchange: rows of tokens to the ranks of their experts, and what these make of them back.

    dispatch       rows of tokens, and a number with each, to their experts; combine_back moves gradients the same way
    combine        rows of experts back, added up for each token; dispatch_back moves gradients the same way

Both are linear and each is the transpose of the other, so that two moves serve for forward and backward. Gates are the
numbers that travel with rows: experts' rows are multiplied by them where they were made.
"""

from __future__ import annotations

from typing import Any, Protocol

from commlib.dtypes import Array
from commlib.expert.passage import Assigned
from commlib.expert.placement import Placement

Rows = Any
"""An array of the host, or a `DeviceArray`."""


class Exchange(Protocol):
    """How rows travel. All calls are collective, the same ones in the same order on all ranks.

    Rows are contiguous arrays [number, width] of a float dtype; a rank may have none. what: of which layer, for errors.
    Where rows are a device's, so are gates and numbers, but for the gates given to `dispatch`. What a passage is, the
    exchange knows that has made it.
    """

    placement: Placement

    def dispatch(self, what: str, assigned: Assigned, x: Rows, gates: Array) -> tuple[Any, Rows, Rows, Array]:
        """Send rows of `x` [tokens, width], and gates (float32, a number with each assignment).

        Returns the passage; the rows that came, expert by expert, within an expert by rank and then by token; their
        gates; and how many there are for each expert of this rank (int32). The rows are this rank's memory while
        that array, or another one of it, exists.
        """
        ...

    def dispatch_back(self, what: str, passage: Any, rows: Rows, numbers: Rows) -> tuple[Rows, Rows]:
        """Return for each token of this rank the sum of its rows, and the number of each assignment."""
        ...

    def combine(self, what: str, passage: Any, rows: Rows, gates: Rows) -> Rows:
        """Multiply rows by gates, and return for each token of this rank the sum of its rows."""
        ...

    def combine_back(self, what: str, passage: Any, x: Rows) -> Rows:
        """Send rows of `x` [tokens, width]; return those that came, as `dispatch` does."""
        ...


Empty = Any
"""Makes the array of a result, of a shape and a dtype."""
