"""Masks of a call of attention: that of queries and that of keys as one, over the keys of ranks 0, 1, ..."""

from __future__ import annotations

import torch
from torch import Tensor

from commlib.context_parallel import Layout
from commlib.sharding.axis import Axis
from commlib.tensor_parallel.moves import gather
from commlib_torch.tensor._taken import taken
from commlib_torch.tensor.moves import moved


def whole_mask(mask: Tensor | None, key_mask: Tensor | None, axis: Axis, layout: Layout) -> Tensor | None:
    """Return the mask of this rank's queries, with four dimensions, or None. Collective, if there is one of keys."""
    found = None
    if mask is not None:
        found = taken(mask[(None,) * (4 - mask.dim())], layout.by_rank, 3)
    if key_mask is None:
        return found
    keys = moved(key_mask.byte(), Axis(axis.comm), gather(1, lengths=layout.counts)).bool()[:, None, None]
    if found is None:
        return keys
    return found & keys if found.dtype is torch.bool else found.masked_fill(~keys, -torch.inf)
