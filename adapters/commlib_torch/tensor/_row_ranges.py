"""Row ranges of tensors, in another order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def take_ranges(x: Tensor, ranges: Sequence[range], dim: int) -> Tensor:
    """Return the rows in these ranges along `dim`, concatenated."""
    if len(ranges) == 1 and len(ranges[0]) == x.shape[dim]:
        return x
    parts = [x.narrow(dim, part.start, len(part)) for part in ranges]
    return torch.cat(parts, dim) if parts else x.narrow(dim, 0, 0)
