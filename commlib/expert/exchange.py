"""Exchange: rows of tokens to the ranks of their experts, and what these make of them back.

    dispatch       rows of tokens, and a number with each, to their experts; combine_back moves gradients the same way
    combine        rows of experts back, added up for each token; dispatch_back moves gradients the same way

Both are linear and each is the transpose of the other, so that two moves serve for forward and backward. Gates are the
numbers that travel with rows: experts' rows are multiplied by them where they were made.
"""

from __future__ import annotations

from typing import Any, Protocol

from commlib.dtypes import Array
from commlib.expert.passage import Assigned, Passage
from commlib.expert.placement import Placement


class Exchange(Protocol):
    """How rows travel. All calls are collective, the same ones in the same order on all ranks.

    Rows are contiguous arrays [number, width] of a float dtype; a rank may have none. what: of which layer, for errors.
    They are numpy's, and passages too; of a device rows, what travels with them but the gates that are given to
    `dispatch`, and passages are the device's (see `commlib.expert.on_device`).
    """

    placement: Placement

    def dispatch(self, what: str, assigned: Assigned, x: Array, gates: Array) -> tuple[Passage, Array, Array, Array]:
        """Send rows of `x` [tokens, width], and gates (float32, a number with each assignment).

        Returns the passage; the rows that came, expert by expert, within an expert by rank and then by token; their
        gates; and how many there are for each expert of this rank (int32). The rows are this rank's memory while
        that array, or another one of it, exists.
        """
        ...

    def dispatch_back(self, what: str, passage: Passage, rows: Array, numbers: Array) -> tuple[Array, Array]:
        """Return for each token of this rank the sum of its rows, and the number of each assignment."""
        ...

    def combine(self, what: str, passage: Passage, rows: Array, gates: Array) -> Array:
        """Multiply rows by gates, and return for each token of this rank the sum of its rows."""
        ...

    def combine_back(self, what: str, passage: Passage, x: Array) -> Array:
        """Send rows of `x` [tokens, width]; return those that came, as `dispatch` does."""
        ...


Empty = Any
"""Makes the array of a result, of a shape and a dtype."""
