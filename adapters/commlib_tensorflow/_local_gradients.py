"""Local gradients: those of a rank's own variables, which are scaled, and those of weights that see other ranks' data.

Such weights are experts, for example. Their gradients are reduced among the copies of each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from commlib import horovod as core
from commlib.dtypes import Array
from commlib.literals import Op
from commlib.sharding.shards import Shard, group_local_shards
from commlib_tensorflow._gradient_tensors import scale_gradient
from commlib_tensorflow._host_calls import Spec, call_in_order, refuse_eager_forward_mode, result_empty
from commlib_tensorflow._shards import shards_of
from commlib_tensorflow.gradients import TensorReducer


def places_of(variables: Sequence[Any]) -> list[int]:
    """Return the indices of weights that see data of several ranks."""
    return [place for place, shard in enumerate(shards_of(variables)) if shard is not None and shard.is_local]


def add_local(
    reducer: TensorReducer,
    gradients: Sequence[Any],
    variables: Sequence[Any],
    reduced: Mapping[int, Any],
    *,
    scale: bool,
) -> list[Any]:
    """Return all gradients, of which `reduced` has some by index. The others do not travel over the reducer's ranks.

    scale: divide them by the number of ranks, as if they were averaged with zeros of the others.
    """
    factor = 1 / reducer.size if scale else 1.0
    results = [reduced[n] if n in reduced else scale_gradient(one, factor) for n, one in enumerate(gradients)]
    if places := places_of(variables):
        op: Op = "sum" if reducer.op == core.Sum else "mean"
        own, theirs = [gradients[place] for place in places], [variables[place] for place in places]
        for place, gradient in zip(places, reduce_local(own, theirs, op, reducer.size), strict=True):
            results[place] = gradient
    return results


def reduce_local(gradients: Sequence[Any], variables: Sequence[Any], op: Op, ranks: int) -> list[Any]:
    """Reduce the gradients of such weights by `op` ("mean" or "sum") over all ranks that train together.

    None stays None. Collective over the ranks that hold copies of one. Raises UsageError if ranks hold parts of
    different sizes.
    """
    shards = shards_of(variables)
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
