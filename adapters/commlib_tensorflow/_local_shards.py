"""Gradients of weights, such as experts, that see data of several ranks: reduced among the copies of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from commlib.dtypes import Array
from commlib.literals import Op
from commlib.sharding.shards import Shard, group_local_shards
from commlib_tensorflow._host_calls import Spec, call_in_order, refuse_eager_forward_mode, result_empty
from commlib_tensorflow._shards import shard_of


def places_of(variables: Sequence[Any]) -> list[int]:
    """Return the indices of such variables."""
    return [place for place, one in enumerate(variables) if (shard := shard_of(one)) is not None and shard.is_local]


def reduce_local(gradients: Sequence[Any], variables: Sequence[Any], op: Op, ranks: int) -> list[Any]:
    """Reduce the gradients of such variables by `op` ("mean" or "sum") over all ranks that train together.

    None stays None. Collective over the ranks that hold copies of one. Raises UsageError if ranks hold parts of
    different sizes.
    """
    shards = [shard_of(variable) for variable in variables]
    names = [getattr(variable, "path", variable.name) for variable in variables]  # TensorFlow's variables have no path
    group_local_shards(zip(names, shards, strict=True))
    tensors = [None if gradient is None else tf.convert_to_tensor(gradient) for gradient in gradients]
    there = [place for place, gradient in enumerate(tensors) if gradient is not None]
    copied = [place for place in there if _require_shard(shards[place]).replicas is not None]
    if copied:

        def add_up(*arrays: Array) -> Sequence[Array]:
            results = []
            for place, array in zip(copied, arrays, strict=True):
                replicas = _require_shard(shards[place]).replicas
                assert replicas is not None
                out = result_empty(array.shape, array.dtype)
                results.append(replicas.all_reduce(array, op, out=out))
            return results

        given = [tensors[place] for place in copied]
        refuse_eager_forward_mode("experts", given, "take their gradients outside of the accumulator")
        totals = call_in_order("experts", add_up, given, list(map(Spec.like, given)))
        for place, total in zip(copied, totals, strict=True):
            tensors[place] = total
    for place in there:
        factor = _require_shard(shards[place]).scale(op, ranks)
        if factor != 1:
            gradient: Any = tensors[place]
            tensors[place] = gradient * tf.constant(factor, gradient.dtype)
    return tensors


def _require_shard(shard: Shard | None) -> Shard:
    assert shard is not None
    return shard
