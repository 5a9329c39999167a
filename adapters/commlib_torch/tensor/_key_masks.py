"""Attention masks: join the masks of queries and of keys, over the keys of ranks 0, 1, ..."""

from __future__ import annotations

import torch
from torch import Tensor

from commlib.context_parallel import SequenceLayout
from commlib.sharding.axis import ParallelAxis
from commlib.tensor_parallel.moves import gather
from commlib_torch.tensor._row_ranges import take_ranges
from commlib_torch.tensor.moves import redistribute


def whole_mask(
    mask: Tensor | None, key_mask: Tensor | None, axis: ParallelAxis, layout: SequenceLayout
) -> Tensor | None:
    """Return the mask of this rank's queries, with four dimensions, or None. Collective if there is a key mask."""
    found = None
    if mask is not None:
        found = take_ranges(mask[(None,) * (4 - mask.dim())], layout.by_rank, 3)
    if key_mask is None:
        return found
    keys = redistribute(key_mask.byte(), ParallelAxis(axis.comm), gather(1, lengths=layout.counts)).bool()[
        :, None, None
    ]
    if found is None:
        return keys
    return found & keys if found.dtype is torch.bool else found.masked_fill(~keys, -torch.inf)
