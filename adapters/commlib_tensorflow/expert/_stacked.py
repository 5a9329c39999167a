"""Experts of one rank: weights of one layer, stacked along their first dimension."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from commlib.errors import UsageError
from commlib.expert.placement import Placement
from commlib.expert.ranks import ExpertRanks, shard_for
from commlib.functional.axis import Axis
from commlib.functional.shards import part
from commlib.tensor.sharding import Nested, Sharding
from commlib.tensor.streams import fold
from commlib_tensorflow._shards import mark
from commlib_tensorflow.expert.mlp import MLP
from commlib_tensorflow.tensor.optimizing import watch_optimizers


class Expert:
    """An expert as a layer of Keras, of which there is one for all experts: `call` is given the weights of one.

    It is no layer itself, so that Keras takes the layer's weights for nobody's.
    """

    def __init__(self, layer: Any) -> None:
        self.layer = layer

    def call(self, weights: Sequence[Any], rows: Any) -> Any:
        """Return what the expert with these weights makes of rows."""
        out, _ = self.layer.stateless_call(list(weights), [], rows)
        return out


def stacked(
    owner: Any, make: Callable[[], Any], width: int, seed: int, placement: Placement, ranks: ExpertRanks
) -> tuple[Expert, list[Any]]:
    """Return an expert, and the weights of those of this rank, which become `owner`'s.

    The values of an expert depend on the seed and its number alone, not on the ranks. Raises UsageError for layers that
    cannot be stacked.
    """
    made = []
    for expert in placement.of_rank(ranks.axis.rank):
        with seeded(fold(seed, expert)):
            layer = make()
            if not isinstance(layer, keras.layers.Layer):
                raise UsageError(f"{owner.name}: expert= made a {type(layer).__name__}, expected a layer of Keras")
            if not layer.built:
                layer.build((None, width))
            made.append(layer)
    first = made[0]
    if first.non_trainable_variables:
        raise UsageError(
            f"{owner.name}: an expert has {first.non_trainable_variables[0].path}, which is not trained: experts keep "
            "trainable weights alone, since each sees other tokens (no dropout, no batch normalisation)"
        )
    stacks = []
    is_divided = isinstance(first, MLP) and ranks.tensor is not None
    divided = first.divided() if is_divided else {}
    for number, variable in enumerate(first.trainable_variables):
        values = np.stack([layer.trainable_variables[number].numpy() for layer in made])
        name = f"experts_{number}_{variable.name}"
        stacks.append(_stack(owner, name, values, divided.get(variable.name), placement, ranks))
    watch_optimizers()
    return Expert(first), stacks


def _stack(
    owner: Any, name: str, values: Any, divided: Sharding | None, placement: Placement, ranks: ExpertRanks
) -> Any:
    """Return a weight of `owner` with the values of this rank's experts, one behind another."""
    shard = shard_for((len(placement.owners), *values.shape[1:]), divided, ranks)
    if isinstance(shard.sharding, Nested):
        assert ranks.tensor is not None
        values = part(values, shard.sharding.inner, ranks.tensor.rank, ranks.tensor.size)
    weight = owner.add_weight(
        shape=values.shape, initializer=lambda shape, dtype: keras.ops.cast(values, dtype), trainable=True, name=name
    )
    mark(weight, shard)
    return weight


def computed(expert: Expert, stacks: Sequence[Any], rows: Any, counts: Any, local: int, tensor: Axis | None) -> Any:
    """Return what the experts of a rank make of their rows, of which each has `counts`.

    tensor: the ranks among which each of them is divided, if it is.
    """
    if isinstance(expert.layer, MLP):
        return expert.layer.grouped(stacks, rows, counts, local, tensor)
    parts = tf.split(rows, counts, num=local)
    values = zip(*(tf.unstack(keras.ops.convert_to_tensor(one), num=local) for one in stacks), strict=True)
    return tf.concat([expert.call(weights, part) for weights, part in zip(values, parts, strict=True)], 0)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Let Python's generator, from which Keras takes seeds, begin anew inside, and go on as before afterwards."""
    before = random.getstate()
    random.seed(seed)
    try:
        yield
    finally:
        random.setstate(before)
