"""Apart: of a call with parts of sequences make that of the whole, and of one with the whole that of this rank."""

from __future__ import annotations

from collections.abc import Mapping

import tensorflow as tf

from commlib.sharding.axis import Axis
from commlib_tensorflow.tensor._calls import Call
from commlib_tensorflow.tensor._forward import numbers_of
from commlib_tensorflow.tensor.moves import gather, scatter


def apart(axis: Axis, call: Call, dims: Mapping[int, int], *, is_part: bool) -> tuple[Call, Call]:
    """Return calls as `commlib.tensor_parallel.checks.numbers.Runs` says. Collective."""
    with tf.init_scope():
        given = list(numbers_of(call).tensors)
        if is_part:  # what has no numbers gets others on each rank
            own = numbers_of(call, seed=axis.rank).tensors
            given = [own[at] if at in dims else one for at, one in enumerate(given)]
        move = gather if is_part else scatter
        changed = [move(one, axis, dims[at]) if at in dims else one for at, one in enumerate(given)]
    before, after = call.with_tensors(tuple(given)), call.with_tensors(tuple(changed))
    return (after, before) if is_part else (before, after)
