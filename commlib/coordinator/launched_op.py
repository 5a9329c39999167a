"""LaunchedOp: pair an agreed operation with this rank's arrays for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from commlib.coordinator.negotiation import Launch
from commlib.coordinator.pending_op import PendingOp
from commlib.dtypes import NUMPY, Array


class LaunchedOp(NamedTuple):
    """One agreed operation on this rank; `pending` is None if this rank has joined."""

    launch: Launch
    pending: PendingOp | None

    def inputs(self) -> Sequence[Array]:
        """Return the input arrays. If this rank has joined, these are arrays without rows, or arrays to overwrite."""
        if self.pending is not None:
            return self.pending.inputs
        shapes = [(NUMPY[dtype], [length or 0 for length in shape]) for dtype, shape in self.launch.request.tensors]
        return [np.zeros(shape, dtype) for dtype, shape in shapes]
