"""Token check: tensor-parallel ranks of an expert must have the same tokens; a layer's first call compares them."""

from __future__ import annotations

import numpy as np

from commlib.comparison.gradient_comparison import print_of, tolerance_of
from commlib.dtypes import Array
from commlib.errors import MismatchError
from commlib.sharding.axis import ParallelAxis


def check_same_tokens(name: str, tensor: ParallelAxis | None, logits: Array) -> None:
    """Raise MismatchError on all tensor-parallel ranks unless a layer has the same tokens on all of them. Collective.

    name: of the layer. logits: the router's output for this rank's tokens.
    """
    if tensor is None or tensor.size == 1:
        return
    comm, number = tensor.comm, len(logits)
    told = comm.all_gather(np.array([[number, print_of(logits), float(np.abs(logits).sum())]], np.float64))
    counts, prints, sizes = told.T
    if not np.isfinite(told).all():
        return
    counts_differ = bool((counts != counts[0]).any())
    if not counts_differ and np.abs(prints - prints[0]).max() <= tolerance_of("float32") * max(sizes.max(), 1e-30):
        return
    here = f"{[int(one) for one in counts]} tokens" if counts_differ else "different tokens"
    raise MismatchError(
        f"{name} on rank {comm.rank} of {comm.name}: ranks along tp have {here}, but need the same tokens, because "
        "they shard each expert. Remove sequence= and Sequence, which split the tokens among ranks, from the plan "
        "of a model with experts; otherwise give these ranks the same batches and one seed"
    )
