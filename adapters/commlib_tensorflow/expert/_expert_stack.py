"""Experts of one rank: the weights of one layer, stacked along their first dimension."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from commlib.errors import UsageError
from commlib.expert.expert_ranks import ExpertRanks, shard_for
from commlib.expert.placement import ExpertPlacement
from commlib.sharding.axis import ParallelAxis
from commlib.sharding.sharding import NestedSharding
from commlib.sharding.shards import Shard, part
from commlib.tensor_parallel.streams import fold
from commlib_tensorflow._shards import mark
from commlib_tensorflow.expert._expert_optimizers import watch_steps
from commlib_tensorflow.expert._expert_settings import (
    ExpertConstraint,
    ExpertRegularizer,
    check_call,
    check_layer,
    check_rows,
    check_scope,
    takes_training,
)
from commlib_tensorflow.expert._step_hooks import watch_updates
from commlib_tensorflow.expert.mlp import MLP
from commlib_tensorflow.tensor.optimizing import watch_optimizers


class Expert:
    """One Keras layer that serves as every expert: `call` gets the weights of the expert.

    It is not a Keras layer itself, so that Keras does not track the layer's weights.
    """

    def __init__(self, name: str, layer: Any) -> None:
        self.name, self.layer = name, layer
        self._takes_training = takes_training(layer)
        inner = [one for one in layer._flatten_layers() if type(one) not in (*_MODELS, keras.layers.InputLayer)]
        self._takes_none = all(type(one) in _TAKE_NONE for one in inner)

    def call_if_rows(self, weights: Sequence[Any], rows: Any, *, training: bool) -> Any:
        """Like `call`, but without rows nothing is called, and the weights' gradients are zeros.

        Of zero rows a mean is NaN, convolutions return other shapes, and pooling aborts the process in backward.
        """
        if self._takes_none or rows.shape[0]:
            return self.call(weights, rows, training=training)
        if tf.executing_eagerly():
            return _no_rows(rows, *weights)
        is_some = tf.shape(rows)[0] > 0
        return tf.cond(is_some, lambda: self.call(weights, rows, training=training), lambda: rows)

    def call(self, weights: Sequence[Any], rows: Any, *, training: bool) -> Any:
        """Return the output of the expert with these weights for rows.

        Raises UsageError if it differs in shape or dtype.
        """
        options = {"training": training} if self._takes_training else {}
        out, _ = self.layer.stateless_call(list(weights), [], rows, **options)
        check_rows(self.name, rows, out)
        return out


@tf.custom_gradient  # type: ignore[untyped-decorator]
def _no_rows(rows: Any, *weights: Any) -> Any:
    """Return the (zero) rows, with zeros as gradients of weights."""
    return tf.identity(rows), lambda of_rows: (of_rows, *map(tf.zeros_like, weights))


def stack_experts(
    owner: Any, make: Callable[[], Any], width: int, seed: int, placement: ExpertPlacement, ranks: ExpertRanks
) -> tuple[Expert, list[Any]]:
    """Return an expert, and the stacked weights of this rank's experts, which belong to `owner`.

    The values of an expert depend only on the seed and its number, not on the ranks. Raises UsageError for layers that
    cannot be stacked. A `keras.RematScope` is suspended: TensorFlow recomputes a layer with the variables it owns
    instead of the weights of one expert, whose gradients would be lost.
    """
    experts = []
    for expert in placement.of_rank(ranks.axis.rank):
        with use_seed(fold(seed, expert)), keras.RematScope(mode=None):
            layer = make()
            if not isinstance(layer, keras.layers.Layer):
                raise UsageError(f"{owner.name}: expert= made a {type(layer).__name__}, expected a Keras layer")
            if not layer.built:
                layer.build((None, width))
            experts.append(layer)
    first = experts[0]
    if not isinstance(first, MLP):
        check_layer(owner.name, first)
        check_scope(owner.name, first)
        check_call(owner.name, first, width)
    stacks = []
    divided = first.divided() if isinstance(first, MLP) and ranks.tensor is not None else {}
    for number, variable in enumerate(first.trainable_variables):
        values = np.stack([layer.trainable_variables[number].numpy() for layer in experts])
        name = f"experts_{number}_{variable.name}"
        shard = shard_for((len(placement.owners), *values.shape[1:]), divided.get(variable.name), ranks)
        stacks.append(_stack(owner, name, values, shard, ranks, **_settings(first, variable, ranks)))
    watch_optimizers()
    watch_steps()
    watch_updates()
    return Expert(owner.name, first), stacks


def _settings(layer: Any, variable: Any, ranks: ExpertRanks) -> dict[str, Any]:
    """Return the settings of a stack, from one expert's weight."""
    one, constraint = variable.regularizer, variable.constraint
    return {
        "dtype": variable.dtype,
        "autocast": isinstance(layer, MLP),  # other layers cast each weight themselves
        "regularizer": None if one is None else ExpertRegularizer(one, ranks.axis.size),
        "constraint": None if constraint is None else ExpertConstraint(constraint),
    }


def _stack(owner: Any, name: str, values: Any, shard: Shard, ranks: ExpertRanks, **settings: Any) -> Any:
    """Add a weight to `owner`, with the stacked values of this rank's experts."""
    if isinstance(shard.sharding, NestedSharding):
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


def run_experts(
    expert: Expert,
    stacks: Sequence[Any],
    rows: Any,
    counts: Any,
    local: int,
    tensor: ParallelAxis | None,
    *,
    training: bool,
) -> Any:
    """Return the outputs of a rank's experts for their rows; expert e has counts[e] of them.

    tensor: the ranks over which each expert is sharded, if it is.
    """
    if isinstance(expert.layer, MLP):
        return expert.layer.grouped(stacks, rows, counts, local, tensor)
    parts = tf.split(rows, counts, num=local)
    values = zip(*(tf.unstack(keras.ops.convert_to_tensor(one), num=local) for one in stacks), strict=True)
    each = zip(values, parts, strict=True)
    return tf.concat([expert.call_if_rows(weights, part, training=training) for weights, part in each], 0)


_MODELS = keras.Sequential, type(keras.Model(_x := keras.Input(()), _x))
"""Models that only call their layers."""
_TAKE_NONE = (
    keras.layers.Dense, keras.layers.EinsumDense, keras.layers.Activation, keras.layers.ReLU, keras.layers.LeakyReLU,
    keras.layers.PReLU, keras.layers.ELU, keras.layers.Softmax, keras.layers.Identity, keras.layers.Add,
    keras.layers.Multiply, keras.layers.LayerNormalization, keras.layers.RMSNormalization,
)  # fmt: skip
"""Layers that support zero rows, forward and backward."""


@contextmanager
def use_seed(seed: int) -> Iterator[None]:
    """Seed Python's random generator, from which Keras takes seeds, and restore its state afterwards."""
    before = random.getstate()
    random.seed(seed)
    try:
        yield
    finally:
        random.setstate(before)
