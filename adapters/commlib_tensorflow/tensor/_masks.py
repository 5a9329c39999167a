"""Masks of Keras for layers with an input or output sharded along a sequence: a mask moves with its tensor."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from commlib.sharding.axis import ParallelAxis
from commlib.tensor_parallel import moves
from commlib.tensor_parallel.moves import Redistribute
from commlib_tensorflow.tensor.moves import redistribute


def gather_mask(mask: Any, axis: ParallelAxis, sequence: int | None, dims: int) -> Any:
    """Gather the mask of a whole sequence from its shards. dims: the number of dimensions of the tensor."""
    return mask if sequence is None else _move(mask, axis, moves.gather(sequence % dims))


def scatter_mask(mask: Any, axis: ParallelAxis, sequence: int | None, dims: int) -> Any:
    """Return the mask of this rank's shard of a sequence, given the mask of the whole sequence."""
    return mask if sequence is None else _move(mask, axis, moves.scatter(sequence % dims))


def _move(mask: Any, axis: ParallelAxis, move: Redistribute) -> Any:
    if mask is None or isinstance(mask, keras.KerasTensor):  # shapes of models are unsharded
        return mask
    return redistribute(tf.convert_to_tensor(mask), axis, move)
