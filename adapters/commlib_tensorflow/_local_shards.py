"""Gradients of weights, such as experts, that see the data of several ranks: added up among their copies alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from commlib.dtypes import Array
from commlib.sharding.shards import Shard, reduced_apart
from commlib_tensorflow._graph import Spec, call_in_order, result_empty
from commlib_tensorflow._shards import shard_of


def places_of(variables: Sequence[Any]) -> list[int]:
    """Return the places of such variables."""
    return [place for place, one in enumerate(variables) if (shard := shard_of(one)) is not None and shard.is_local]


def reduced(gradients: Sequence[Any], variables: Sequence[Any], op: str, ranks: int) -> list[Any]:
    """Return the gradients of such variables as `op` ("mean" or "sum") over all ranks that train together makes them.

    None stays None. Collective over the ranks that have copies of one. Raises UsageError where ranks have parts of
    different sizes.
    """
    shards = [shard_of(variable) for variable in variables]
    names = [getattr(variable, "path", variable.name) for variable in variables]  # those of TensorFlow have no path
    reduced_apart(zip(names, shards, strict=True))
    found = [None if gradient is None else tf.convert_to_tensor(gradient) for gradient in gradients]
    there = [place for place, gradient in enumerate(found) if gradient is not None]
    copied = [place for place in there if _of(shards[place]).replicas is not None]
    if copied:

        def add_up(*arrays: Array) -> Sequence[Array]:
            results = []
            for place, array in zip(copied, arrays, strict=True):
                replicas = _of(shards[place]).replicas
                assert replicas is not None
                out = result_empty(array.shape, array.dtype)
                results.append(replicas.all_reduce(array, op, out=out))
            return results

        given = [found[place] for place in copied]
        totals = call_in_order("experts", add_up, given, list(map(Spec.like, given)))
        for place, total in zip(copied, totals, strict=True):
            found[place] = total
    for place in there:
        factor = _of(shards[place]).scale(op, ranks)
        if factor != 1:
            gradient: Any = found[place]
            found[place] = gradient * tf.constant(factor, gradient.dtype)
    return found


def _of(shard: Shard | None) -> Shard:
    assert shard is not None
    return shard
