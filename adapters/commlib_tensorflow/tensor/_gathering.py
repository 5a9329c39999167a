"""Gathering: the whole of what is divided, with this rank's part of its gradient; regularizers that need the whole."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from commlib.sharding.axis import Axis
from commlib.sharding.sharding import Sharding
from commlib.sharding.shards import Shard
from commlib.sharding.sharers import sharers_of
from commlib.tensor_parallel import moves
from commlib_tensorflow._bridge import as_tensor
from commlib_tensorflow.tensor._sharing import for_sharers
from commlib_tensorflow.tensor.moves import moved

SUMS = (keras.regularizers.L1, keras.regularizers.L2, keras.regularizers.L1L2)
"""Regularizers that are sums over elements: of a part they have the gradient of that part, and are not gathered."""


def is_sum(regularizer: Any) -> bool:
    """Return whether a regularizer is known to be a sum over elements."""
    return type(regularizer) in SUMS


def gathered(out: Any, axis: Axis, sharding: Sharding, dim: int = -1, *, layer: Any = None) -> Any:
    """Return the outputs of all ranks in the order of the whole, along a dimension. layer: whose outputs these are."""
    lengths = sharding.lengths(axis.size)
    whole = moved(out, axis, moves.gather(dim, lengths=lengths), layer=layer)
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


class Regularizer:
    """A regularizer of a variable that is divided: it sees the whole, as it did before."""

    def __init__(self, plain: Any, axis: Axis, sharding: Sharding) -> None:
        self.plain, self.axis, self.sharding = plain, axis, sharding
        self.sharers = sharers_of(axis, sharding)

    def __call__(self, own: Any) -> Any:
        """Return the loss of the whole, of which the gradient is this rank's part. Collective."""
        own = for_sharers(self.sharers, as_tensor(own), self.sharding.dim)
        return self.plain(gathered(own, self.axis, self.sharding, self.sharding.dim))


def regularize_whole(variable: Any, shard: Shard) -> None:
    """Let the regularizer of a variable that was divided see the whole, unless it is a sum over elements."""
    plain = getattr(variable, "regularizer", None)
    if plain is not None and not is_sum(plain) and isinstance(shard.sharding, Sharding):
        variable.regularizer = Regularizer(plain, shard.axis, shard.sharding)
