"""Calls of user-defined experts in Keras: without rows, and as identical copies."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from commlib import Communicator, Mesh
from commlib.errors import MismatchError, UsageError
from commlib.expert import Experts
from commlib_tensorflow import DistributedOptimizer
from commlib_tensorflow.expert import MoE, expertize

L = keras.layers
WIDTH = 4


class Mean(keras.layers.Layer):  # type: ignore[misc]
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.up, self.down = L.Dense(6, "gelu"), L.Dense(WIDTH)

    def build(self, shape: Any) -> None:
        self.up.build(shape)
        self.down.build((*shape[:-1], 6))
        self.scale = self.add_weight(shape=(1,), initializer="ones")

    def call(self, x: Any) -> Any:
        return self.down(self.up(x)) * self.scale * self.size(x)

    def size(self, x: Any) -> Any:
        return tf.reduce_mean(tf.abs(x))


class Deviation(Mean):
    """A layer whose gradient of a single row is NaN."""

    def size(self, x: Any) -> Any:
        return tf.math.reduce_std(x, 0)


class OwnModel(keras.Model):  # type: ignore[misc]
    """A model that does more than call its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = L.Dense(6, "gelu"), L.Dense(WIDTH)

    def build(self, shape: Any) -> None:
        self.up.build(shape)
        self.down.build((*shape[:-1], 6))

    def call(self, x: Any) -> Any:
        return self.down(self.up(x) * tf.reduce_mean(self.up(x)))


class Sharing(Mean):
    """An MLP with a layer that its model also calls earlier."""

    def __init__(self, norm: Any, **options: Any) -> None:
        super().__init__(**options)
        self.norm = norm

    def call(self, x: Any) -> Any:
        return super().call(self.norm(x))

    def size(self, x: Any) -> Any:
        return 1.0

    def get_config(self) -> Any:
        return {"norm": self.norm, "name": self.name}

    @classmethod
    def from_config(cls, config: Any) -> Any:
        return cls(**config)


def test_layers_that_an_mlp_shares_with_others_are_refused(comm: Communicator) -> None:
    """Regression: each expert had a copy of the weights, and the earlier layer got a part of their gradients."""
    keras.utils.set_random_seed(0)
    norm, x = L.LayerNormalization(name="norm"), keras.Input((WIDTH,))
    hidden = norm(x)
    two = Mean(name="two")
    model = keras.Model(x, two(Sharing(norm, name="mlp")(hidden)))
    options = Experts(2 * comm.size, copy=True)
    with pytest.raises(
        UsageError, match=r"expertize: mlp: .*norm/gamma is tied: it is also a weight of norm, outside of the MLP"
    ):
        expertize(model, comm, {"mlp": options})
    expertize(model, comm, {"mlp": Experts(2 * comm.size, hidden=3)})


def rows(rank: int) -> Any:
    return np.random.default_rng(rank).normal(size=(6, WIDTH)).astype(np.float32)


@pytest.mark.parametrize("in_graph", [False, True])
@pytest.mark.parametrize("kind", [Mean, Deviation, OwnModel])
def test_experts_without_rows_have_zeros_as_gradients(comm: Communicator, kind: Any, in_graph: bool) -> None:
    """Regression: they were called, and a mean of no rows, or a deviation of one, has NaN gradients."""
    keras.utils.set_random_seed(0)
    layer = MoE(Experts(2 * comm.size, top_k=1, balance="none"), comm, expert=kind)
    layer.build((None, WIDTH))
    layer.router.assign(tf.zeros_like(layer.router))  # all tokens go to the first one

    def gradients(x: Any) -> Any:
        with tf.GradientTape() as tape:
            out = tf.reduce_sum(layer(x, training=True))
        return tape.gradient(out, layer.stacks)

    result = (tf.function(gradients) if in_graph else gradients)(tf.constant(rows(comm.rank)))
    for one in result:
        assert one is not None
        assert np.isfinite(one).all()
        assert not np.any(np.asarray(one)[int(comm.rank == 0) :])


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("mixes", [False, True])
def test_identical_experts_may_have_equal_gradients(comm: Communicator, mixes: bool) -> None:
    """Regression: an error claimed that the gradients of identical copies of an MLP had already been reduced."""
    keras.utils.set_random_seed(0)
    mesh = Mesh(dp=-1)
    x = keras.Input((WIDTH,))
    mlp = keras.Sequential([keras.Input((WIDTH,)), L.Dense(6, "gelu"), L.Dense(WIDTH)], name="mlp")
    model = keras.Model(x, mlp(x))
    expertize(model, mesh, {"mlp": Experts(comm.size, top_k=1 if mixes else comm.size, copy=True, balance="none")})
    layer = model.get_layer("mlp")
    layer.router.assign(tf.zeros_like(layer.router))
    optimizer = DistributedOptimizer(keras.optimizers.SGD(0.1), mesh=mesh)
    with tf.GradientTape() as tape:
        out = tf.reduce_sum(model(tf.constant(rows(comm.rank)), training=True))
    result = tape.gradient(out, model.trainable_variables)
    stacks = {id(one) for one in layer.stacks}
    if mixes:
        result = [
            tf.constant(comm.all_reduce(one.numpy())) if id(weight) in stacks else one
            for one, weight in zip(result, model.trainable_variables, strict=True)
        ]
        with pytest.raises(MismatchError, match="gradients of different experts are the same"):
            optimizer.apply_gradients(zip(result, model.trainable_variables, strict=True))
    else:
        optimizer.apply_gradients(zip(result, model.trainable_variables, strict=True))
    mesh.close()
