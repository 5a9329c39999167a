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
from commlib.sharding.axis import Axis
from commlib.sharding.sharding import Nested
from commlib.sharding.shards import Shard, part
from commlib.tensor_parallel.streams import fold
from commlib_tensorflow._shards import mark
from commlib_tensorflow.expert._after_step import watch_updates
from commlib_tensorflow.expert._keepers import watch_steps
from commlib_tensorflow.expert._of_each import (
    ConstraintOfEach,
    RegularizerOfEach,
    check_call,
    check_layer,
    check_rows,
    check_scope,
    takes_training,
)
from commlib_tensorflow.expert.mlp import MLP
from commlib_tensorflow.tensor.optimizing import watch_optimizers


class Expert:
    """An expert as a layer of Keras, of which there is one for all experts: `call` is given the weights of one.

    It is no layer itself, so that Keras takes the layer's weights for nobody's.
    """

    def __init__(self, name: str, layer: Any) -> None:
        self.name, self.layer = name, layer
        self._takes_training = takes_training(layer)
        inner = [one for one in layer._flatten_layers() if type(one) not in (*_MODELS, keras.layers.InputLayer)]
        self._takes_none = all(type(one) in _TAKE_NONE for one in inner)

    def call_of_some(self, weights: Sequence[Any], rows: Any, *, training: bool) -> Any:
        """Return as `call` does; where there are no rows nothing is called, and gradients of the weights are zeros.

        A mean of none is no number, convolutions make other shapes of none, and pooling ends the process in backward.
        """
        if self._takes_none or rows.shape[0]:
            return self.call(weights, rows, training=training)
        if tf.executing_eagerly():
            return _nothing(rows, *weights)
        is_some = tf.shape(rows)[0] > 0
        return tf.cond(is_some, lambda: self.call(weights, rows, training=training), lambda: rows)

    def call(self, weights: Sequence[Any], rows: Any, *, training: bool) -> Any:
        """Return what the expert with these weights makes of rows. Raises UsageError for others than rows like them."""
        options = {"training": training} if self._takes_training else {}
        out, _ = self.layer.stateless_call(list(weights), [], rows, **options)
        check_rows(self.name, rows, out)
        return out


@tf.custom_gradient  # type: ignore[untyped-decorator]
def _nothing(rows: Any, *weights: Any) -> Any:
    """Return no rows, with zeros as gradients of weights."""
    return tf.identity(rows), lambda of_rows: (of_rows, *map(tf.zeros_like, weights))


def stacked(
    owner: Any, make: Callable[[], Any], width: int, seed: int, placement: Placement, ranks: ExpertRanks
) -> tuple[Expert, list[Any]]:
    """Return an expert, and the weights of those of this rank, which become `owner`'s.

    The values of an expert depend on the seed and its number alone, not on the ranks. Raises UsageError for layers that
    cannot be stacked. In a `keras.RematScope` they are made as outside of it: TensorFlow computes a layer again with
    the variables it has, not with the weights of one expert, whose gradients would be lost.
    """
    made = []
    for expert in placement.of_rank(ranks.axis.rank):
        with seeded(fold(seed, expert)), keras.RematScope(mode=None):
            layer = make()
            if not isinstance(layer, keras.layers.Layer):
                raise UsageError(f"{owner.name}: expert= made a {type(layer).__name__}, expected a layer of Keras")
            if not layer.built:
                layer.build((None, width))
            made.append(layer)
    first = made[0]
    if not isinstance(first, MLP):
        check_layer(owner.name, first)
        check_scope(owner.name, first)
        check_call(owner.name, first, width)
    stacks = []
    divided = first.divided() if isinstance(first, MLP) and ranks.tensor is not None else {}
    for number, variable in enumerate(first.trainable_variables):
        values = np.stack([layer.trainable_variables[number].numpy() for layer in made])
        name = f"experts_{number}_{variable.name}"
        shard = shard_for((len(placement.owners), *values.shape[1:]), divided.get(variable.name), ranks)
        stacks.append(_stack(owner, name, values, shard, ranks, **_settings(first, variable, ranks)))
    watch_optimizers()
    watch_steps()
    watch_updates()
    return Expert(owner.name, first), stacks


def _settings(layer: Any, variable: Any, ranks: ExpertRanks) -> dict[str, Any]:
    """Return what a stack has of one expert's weight."""
    one, constraint = variable.regularizer, variable.constraint
    return {
        "dtype": variable.dtype,
        "autocast": isinstance(layer, MLP),  # other layers say of each weight in what they compute
        "regularizer": None if one is None else RegularizerOfEach(one, ranks.axis.size),
        "constraint": None if constraint is None else ConstraintOfEach(constraint),
    }


def _stack(owner: Any, name: str, values: Any, shard: Shard, ranks: ExpertRanks, **settings: Any) -> Any:
    """Return a weight of `owner` with the values of this rank's experts, one behind another."""
    if isinstance(shard.sharding, Nested):
        assert ranks.tensor is not None
        values = part(values, shard.sharding.inner, ranks.tensor.rank, ranks.tensor.size)
    weight = owner.add_weight(
        shape=values.shape,
        initializer=lambda shape, dtype: keras.ops.cast(values, dtype),
        trainable=True,
        name=name,
        **settings,
    )
    mark(weight, shard)
    return weight


def computed(
    expert: Expert, stacks: Sequence[Any], rows: Any, counts: Any, local: int, tensor: Axis | None, *, training: bool
) -> Any:
    """Return what the experts of a rank make of their rows, of which each has `counts`.

    tensor: the ranks among which each of them is divided, if it is.
    """
    if isinstance(expert.layer, MLP):
        return expert.layer.grouped(stacks, rows, counts, local, tensor)
    parts = tf.split(rows, counts, num=local)
    values = zip(*(tf.unstack(keras.ops.convert_to_tensor(one), num=local) for one in stacks), strict=True)
    each = zip(values, parts, strict=True)
    return tf.concat([expert.call_of_some(weights, part, training=training) for weights, part in each], 0)


_MODELS = keras.Sequential, type(keras.Model(_x := keras.Input(()), _x))
"""Kinds of models that compute by their layers alone."""
_TAKE_NONE = (
    keras.layers.Dense, keras.layers.EinsumDense, keras.layers.Activation, keras.layers.ReLU, keras.layers.LeakyReLU,
    keras.layers.PReLU, keras.layers.ELU, keras.layers.Softmax, keras.layers.Identity, keras.layers.Add,
    keras.layers.Multiply, keras.layers.LayerNormalization, keras.layers.RMSNormalization,
)  # fmt: skip
"""Kinds of layers that make no rows of none, forward and backward."""


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Let Python's generator, from which Keras takes seeds, begin anew inside, and go on as before afterwards."""
    before = random.getstate()
    random.seed(seed)
    try:
        yield
    finally:
        random.setstate(before)
