"""FusionKey: group tensors that can be reduced as one array; read the options of operations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from commlib.coordinator.op_request import OpRequest
from commlib.dtypes import INTEGERS
from commlib.literals import Op


@dataclass(frozen=True, slots=True, eq=False)  # one object per kind, compared by identity
class FusionKey:
    """Key of tensors that can be reduced as one array."""

    dtype: str
    op: Op
    prescale: float
    postscale: float

    def as_run(self, size: int) -> tuple[str, float]:
        """Return the operation to run on `size` ranks, and the scale of its result."""
        if self.op == "mean" and self.postscale != 1 and self.dtype in INTEGERS:
            return "sum", self.postscale / size  # truncated once instead of twice
        return self.op, self.postscale


def options_of(request: OpRequest) -> tuple[str, float, float]:
    """Return operation, prescale and postscale of a reduction."""
    return (
        str(request.option("op", "sum")),
        float(request.option("prescale_factor", 1.0)),
        float(request.option("postscale_factor", 1.0)),
    )


def root_of(request: OpRequest, members: Sequence[int]) -> int:
    """Return the root of an operation, as its index in the group's `members`."""
    return members.index(int(request.option("root", 0)))
