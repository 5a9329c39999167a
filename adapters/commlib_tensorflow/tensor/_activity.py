"""Activity regularizers of sharded layers: the loss counts the full output, the gradient this rank's shard."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from commlib.errors import UsageError
from commlib.sharding.axis import ParallelAxis
from commlib.tensor_parallel.moves import REDUCE
from commlib.tensor_parallel.styles import Column, Replicate, Row, Sequence, Style, Vocabulary
from commlib_tensorflow._host_calls import result_empty
from commlib_tensorflow.tensor._gathering import is_sum
from commlib_tensorflow.tensor.moves import redistribute


class ShardedSum:
    """Regularizer that sums over the shards of all ranks. Its `__class__` is the plain one's.

    copies: the number of ranks with the same shard, which counts once.
    """

    def __init__(self, plain: Any, axis: ParallelAxis, copies: int) -> None:
        self.plain, self.copies = plain, copies
        self.axis = ParallelAxis(axis.comm, empty=result_empty)  # without a codec

    def __call__(self, part: Any) -> Any:
        """Return the sum over the shards of all ranks, with the gradient of this one. Collective."""
        loss = tf.reshape(self.plain(part), [1]) / self.copies
        return redistribute(loss, self.axis, REDUCE)[0]

    def get_config(self) -> Any:
        """Return the configuration of the plain regularizer."""
        return self.plain.get_config()

    @property  # type: ignore[misc]  # for code that reads or writes files
    def __class__(self) -> Any:
        return type(self.plain)


def regularize_activity(layer: Any, axis: ParallelAxis, style: Style, copies: int = 1) -> None:
    """Make the activity regularizer of a sharded layer count the outputs of all ranks, if its output is sharded."""
    plain = layer.activity_regularizer
    if plain is not None and axis.size > 1 and is_sum(plain) and _returns_shard(layer, style):
        layer.activity_regularizer = ShardedSum(plain, axis, copies)


def check_activity(what: str, layer: Any, style: Style) -> None:
    """Raise UsageError for an activity regularizer that would see a shard of the output, or count more than once."""
    plain = getattr(layer, "activity_regularizer", None)
    if plain is None:
        return
    if isinstance(style, Replicate):
        raise UsageError(
            f"plan: {what} has an activity regularizer, whose gradient would be added up over the ranks: put it on a "
            "layer inside or after it"
        )
    if isinstance(style, Column) and not isinstance(style.units, int):
        raise UsageError(
            f"plan: {what} has an activity regularizer, and {style}, under which ranks may share some parts: put it on "
            "the layers after it"
        )
    if not is_sum(plain) and _returns_shard(layer, style):
        raise UsageError(
            f"plan: {what}: its activity regularizer {getattr(plain, '__name__', type(plain).__name__)} would see only "
            "this rank's shard of the output: use L1, L2 or L1L2 of Keras, or put it on a layer after a Row"
        )


def _returns_shard(layer: Any, style: Style) -> bool:
    """Return whether a rank has a shard of a layer's output."""
    if isinstance(style, Row) or (isinstance(style, Vocabulary) and isinstance(layer, keras.layers.Embedding)):
        return style.sequence is not None
    return isinstance(style, Sequence) or (isinstance(style, Column | Vocabulary) and not style.gather)
