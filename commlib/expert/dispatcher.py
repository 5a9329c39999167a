"""Dispatcher protocol: send rows of tokens to the ranks of their experts, and the experts' rows back.

    dispatch       rows of tokens, and a number with each, to their experts; combine_back moves gradients the same way
    combine        rows of experts back, added up for each token; dispatch_back moves gradients the same way

Both are linear and each is the transpose of the other, so two exchanges serve forward and backward. Gates are the
numbers sent with rows: the experts' ranks multiply their rows by them.
"""

from __future__ import annotations

from typing import Any, Protocol

from commlib.dtypes import Array
from commlib.expert.dispatch_plan import Assignments
from commlib.expert.placement import ExpertPlacement

Rows = Any
"""A host array, or a `DeviceArray`."""


class Dispatcher(Protocol):
    """A path for rows. All calls are collective: the same calls in the same order on all ranks.

    Rows are contiguous arrays [number, width] of a float dtype; a rank may have none. what: name of the layer, for
    errors. With device rows, gates and numbers are on the device too, except the gates passed to `dispatch`. A plan is
    opaque: only the dispatcher that made it reads it.
    """

    placement: ExpertPlacement

    def dispatch(self, what: str, assigned: Assignments, x: Rows, gates: Array) -> tuple[Any, Rows, Rows, Array]:
        """Send rows of `x` [tokens, width], and gates (float32, a number with each assignment).

        Returns the plan; the received rows, by expert, then by rank, then by token; their gates; and the number of rows
        for each expert of this rank (int32). The memory of the rows is reserved for the caller as long as that array,
        or a view of it, exists.
        """
        ...

    def dispatch_back(self, what: str, plan: Any, rows: Rows, numbers: Rows) -> tuple[Rows, Rows]:
        """Return for each token of this rank the sum of its rows, and the number of each assignment."""
        ...

    def combine(self, what: str, plan: Any, rows: Rows, gates: Rows) -> Rows:
        """Multiply rows by gates, and return for each token of this rank the sum of its rows."""
        ...

    def combine_back(self, what: str, plan: Any, x: Rows) -> Rows:
        """Send rows of `x` [tokens, width]; return the received rows, in the order of `dispatch`."""
        ...


Empty = Any
"""Allocates a result array from a shape and a dtype."""
