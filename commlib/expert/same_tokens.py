"""Same tokens: ranks that divide each expert must have the same ones, which a layer's first call compares."""

from __future__ import annotations

import numpy as np

from commlib.comparison.whole_weights import print_of, tolerance_of
from commlib.dtypes import Array
from commlib.errors import MismatchError
from commlib.sharding.axis import Axis


def check_same_tokens(name: str, tensor: Axis | None, logits: Array) -> None:
    """Raise MismatchError on all ranks of tensor parallelism unless a layer has the same tokens on them. Collective.

    name: of the layer. logits: what its router makes of this rank's tokens.
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
    here = f"{[int(one) for one in counts]} tokens" if counts_differ else "other tokens"
    raise MismatchError(
        f"{name} on rank {comm.rank} of {comm.name}: ranks along tp have {here}, and must have the same ones, since "
        "they divide each expert: leave sequence= and Sequence, which give each a part of the tokens, out of a plan "
        "for a model with experts; else give these ranks the same batches and one seed"
    )
