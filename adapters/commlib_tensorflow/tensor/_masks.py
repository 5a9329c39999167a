"""Masks of Keras, for layers whose input or output is divided along a sequence: a mask goes where its tensor goes."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from commlib.sharding.axis import Axis
from commlib.tensor_parallel import moves
from commlib.tensor_parallel.moves import Move
from commlib_tensorflow.tensor.moves import moved


def gathered_mask(mask: Any, axis: Axis, sequence: int | None, dims: int) -> Any:
    """Return the mask of a whole sequence, of those of its shards. dims: how many dimensions the tensor has."""
    return mask if sequence is None else _moved(mask, axis, moves.gather(sequence % dims))


def scattered_mask(mask: Any, axis: Axis, sequence: int | None, dims: int) -> Any:
    """Return the mask of this rank's shard of a sequence, of that of the whole."""
    return mask if sequence is None else _moved(mask, axis, moves.scatter(sequence % dims))


def _moved(mask: Any, axis: Axis, move: Move) -> Any:
    if mask is None or isinstance(mask, keras.KerasTensor):  # shapes of models are those of the whole
        return mask
    return moved(tf.convert_to_tensor(mask), axis, move)
