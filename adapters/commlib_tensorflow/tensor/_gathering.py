"""Gathering: the whole of what is divided, with this rank's part of its gradient; regularizers that need the whole."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from commlib.errors import UsageError
from commlib.functional.axis import Axis
from commlib.functional.shards import Shard
from commlib.tensor import moves
from commlib.tensor.sharding import Sharding
from commlib.tensor.styles import Column, Replicate, Row, Sequence, Style, Vocabulary
from commlib_tensorflow._bridge import as_tensor
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
    if len(sharding.parts) < 2:
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

    def __call__(self, own: Any) -> Any:
        """Return the loss of the whole, of which the gradient is this rank's part. Collective."""
        return self.plain(gathered(as_tensor(own), self.axis, self.sharding, self.sharding.dim))


def regularize_whole(variable: Any, shard: Shard) -> None:
    """Let the regularizer of a variable that was divided see the whole, unless it is a sum over elements."""
    plain = getattr(variable, "regularizer", None)
    if plain is not None and not is_sum(plain) and isinstance(shard.sharding, Sharding):
        variable.regularizer = Regularizer(plain, shard.axis, shard.sharding)


def check_activity(what: str, layer: Any, style: Style) -> None:
    """Raise UsageError for an activity regularizer that would see a part of the output, or count more than once."""
    plain = getattr(layer, "activity_regularizer", None)
    if plain is None:
        return
    if isinstance(style, Replicate):
        raise UsageError(
            f"plan: {what} has an activity regularizer, whose gradient would be added up over the ranks: give it to a "
            "layer within or behind it"
        )
    if not is_sum(plain) and _gives_part(layer, style):
        raise UsageError(
            f"plan: {what}: its activity regularizer {getattr(plain, '__name__', type(plain).__name__)} would see this "
            "rank's part of the output: use L1, L2 or L1L2 of Keras, or give it to a layer behind a Row"
        )


def _gives_part(layer: Any, style: Style) -> bool:
    """Return whether a rank has a part of what a layer gives."""
    if isinstance(style, Row) or (isinstance(style, Vocabulary) and isinstance(layer, keras.layers.Embedding)):
        return style.sequence is not None
    return isinstance(style, Sequence) or (isinstance(style, Column | Vocabulary) and not style.gather)
