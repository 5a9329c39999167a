"""Job: pair an agreed operation with what this rank has for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from commlib.coordinator.negotiation import Launch
from commlib.coordinator.pending import Pending
from commlib.dtypes import NUMPY, Array


class Job(NamedTuple):
    """One agreed operation on this rank; `pending` is None where this rank has joined."""

    launch: Launch
    pending: Pending | None

    def inputs(self) -> Sequence[Array]:
        """Return its arrays; where this rank has joined, arrays without rows, or to be overwritten."""
        if self.pending is not None:
            return self.pending.inputs
        shapes = [(NUMPY[dtype], [length or 0 for length in shape]) for dtype, shape in self.launch.request.tensors]
        return [np.zeros(shape, dtype) for dtype, shape in shapes]
