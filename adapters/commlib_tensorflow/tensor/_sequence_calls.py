"""Sequence calls: turn a call with shards of sequences into the full call, and a full call into this rank's."""

from __future__ import annotations

from collections.abc import Mapping

import tensorflow as tf

from commlib.sharding.axis import ParallelAxis
from commlib_tensorflow.tensor._calls import ModelCall
from commlib_tensorflow.tensor._forward import numbers_of
from commlib_tensorflow.tensor.moves import gather, scatter


def split_calls(
    axis: ParallelAxis, call: ModelCall, dims: Mapping[int, int], *, is_part: bool
) -> tuple[ModelCall, ModelCall]:
    """Return calls as `commlib.tensor_parallel.checks.numeric_checks.ModelRunner` defines. Collective."""
    with tf.init_scope():
        given = list(numbers_of(call).tensors)
        if is_part:  # a spec without values gets different ones on each rank
            own = numbers_of(call, seed=axis.rank).tensors
            given = [own[at] if at in dims else one for at, one in enumerate(given)]
        move = gather if is_part else scatter
        changed = [move(one, axis, dims[at]) if at in dims else one for at, one in enumerate(given)]
    before, after = call.with_tensors(tuple(given)), call.with_tensors(tuple(changed))
    return (after, before) if is_part else (before, after)
