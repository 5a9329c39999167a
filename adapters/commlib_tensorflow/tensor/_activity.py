"""Activity regularizers of divided layers: the loss has the whole output's, the gradient is of this rank's part."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from commlib.errors import UsageError
from commlib.sharding.axis import Axis
from commlib.tensor_parallel.moves import REDUCE
from commlib.tensor_parallel.styles import Column, Replicate, Row, Sequence, Style, Vocabulary
from commlib_tensorflow._graph import result_empty
from commlib_tensorflow.tensor._gathering import is_sum
from commlib_tensorflow.tensor.moves import moved


class OfParts:
    """A sum over elements, of which each rank has a part: says of itself that it is the plain one.

    copies: how many ranks have the same part, which counts once.
    """

    def __init__(self, plain: Any, axis: Axis, copies: int) -> None:
        self.plain, self.copies = plain, copies
        self.axis = Axis(axis.comm, empty=result_empty)  # without a codec

    def __call__(self, part: Any) -> Any:
        """Return the sum over the parts of all ranks, with the gradient of this one. Collective."""
        loss = tf.reshape(self.plain(part), [1]) / self.copies
        return moved(loss, self.axis, REDUCE)[0]

    def get_config(self) -> Any:
        """Return the configuration of the plain one."""
        return self.plain.get_config()

    @property  # type: ignore[misc]  # to who writes or reads files
    def __class__(self) -> Any:
        return type(self.plain)


def regularize_activity(layer: Any, axis: Axis, style: Style, copies: int = 1) -> None:
    """Let the activity regularizer of a layer that was divided count the outputs of all ranks, if these are parts."""
    plain = layer.activity_regularizer
    if plain is not None and axis.size > 1 and is_sum(plain) and _gives_part(layer, style):
        layer.activity_regularizer = OfParts(plain, axis, copies)


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
    if isinstance(style, Column) and not isinstance(style.units, int):
        raise UsageError(
            f"plan: {what} has an activity regularizer, and {style}, of which ranks may share some parts: give it to "
            "the layers behind it"
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
