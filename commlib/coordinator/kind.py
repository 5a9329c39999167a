"""Kind: group tensors that can be reduced as one array; and what operations are asked for with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from commlib.coordinator.request import Request
from commlib.dtypes import INTEGERS


@dataclass(frozen=True, slots=True, eq=False)  # one object for each kind, so that it is found by its identity
class Kind:
    """Tell tensors apart: those of one kind can be reduced as one array."""

    dtype: str
    op: str
    prescale: float
    postscale: float

    def as_run(self, size: int) -> tuple[str, float]:
        """Return the operation to run on so many ranks, and the scale of its result."""
        if self.op == "mean" and self.postscale != 1 and self.dtype in INTEGERS:
            return "sum", self.postscale / size  # truncated once, not twice
        return self.op, self.postscale


def options_of(request: Request) -> tuple[str, float, float]:
    """Return operation, prescale and postscale of a reduction."""
    return (
        str(request.option("op", "sum")),
        float(request.option("prescale_factor", 1.0)),
        float(request.option("postscale_factor", 1.0)),
    )


def root_of(request: Request, members: Sequence[int]) -> int:
    """Return which of a group's `members` an operation comes from, by its number in the group."""
    return members.index(int(request.option("root", 0)))
