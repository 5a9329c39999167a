"""Gathering of sharded arrays, with this rank's shard of the gradient; regularizers that need the full array."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from commlib.sharding.axis import ParallelAxis
from commlib.sharding.shard_sharing import sharers_of
from commlib.sharding.sharding import Sharding
from commlib.sharding.shards import Shard
from commlib.tensor_parallel import moves
from commlib_tensorflow._bridge import as_tensor
from commlib_tensorflow.tensor._shared_weights import sum_shared_gradient
from commlib_tensorflow.tensor.moves import redistribute

SUMS = (keras.regularizers.L1, keras.regularizers.L2, keras.regularizers.L1L2)
"""Regularizers that are sums over elements: on a shard they have the shard's gradient, and need no gather."""


def is_sum(regularizer: Any) -> bool:
    """Return whether a regularizer is known to be a sum over elements."""
    return type(regularizer) in SUMS


def gather_outputs(out: Any, axis: ParallelAxis, sharding: Sharding, dim: int = -1, *, layer: Any = None) -> Any:
    """Gather the outputs of all ranks in unsharded order along a dimension. layer: the layer that returned them."""
    lengths = sharding.lengths(axis.size)
    whole = redistribute(out, axis, moves.gather(dim, lengths=lengths), layer=layer)
    if len(sharding.parts) < 2 and sharding.copies(axis.size) == 1:
        return whole
    offsets = [sum(lengths[:rank]) for rank in range(axis.size)]
    pieces = sharding.pieces(axis.size)
    dim %= out.shape.rank
    return tf.concat(
        [
            whole[(slice(None),) * dim + (slice(offsets[rank] + first, offsets[rank] + last),)]
            for rank, first, last, _ in pieces
        ],
        dim,
    )


class GatheredRegularizer:
    """Regularizer of a sharded variable: it sees the gathered variable."""

    def __init__(self, plain: Any, axis: ParallelAxis, sharding: Sharding) -> None:
        self.plain, self.axis, self.sharding = plain, axis, sharding
        self.sharers = sharers_of(axis, sharding)

    def __call__(self, own: Any) -> Any:
        """Return the loss of the gathered variable, with the gradient of this rank's shard. Collective."""
        own = sum_shared_gradient(self.sharers, as_tensor(own), self.sharding.dim)
        return self.plain(gather_outputs(own, self.axis, self.sharding, self.sharding.dim))


def regularize_whole(variable: Any, shard: Shard) -> None:
    """Make the regularizer of a sharded variable see the gathered one, unless it is a sum over elements."""
    plain = getattr(variable, "regularizer", None)
    if plain is not None and not is_sum(plain) and isinstance(shard.sharding, Sharding):
        variable.regularizer = GatheredRegularizer(plain, shard.axis, shard.sharding)
