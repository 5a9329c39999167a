"""Mixtures of experts that a backward recomputes: they count once, and match or are refused."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from commlib import Communicator
from commlib.errors import UsageError
from commlib.expert import Experts
from commlib_tensorflow import pipeline
from commlib_tensorflow.expert import MoE

WIDTH, ROWS = 6, 2


class Block(keras.layers.Layer):  # type: ignore[misc]
    """x + moe(x) with optional recomputation."""

    def __init__(self, moe: Any, again: bool) -> None:
        super().__init__()
        self.moe, self.supports_masking = moe, True
        self.again = tf.recompute_grad(lambda x: x + moe(x)) if again else None

    def build(self, shape: Any) -> None:
        self.moe.build(shape)

    def call(self, x: Any) -> Any:
        return x + self.moe(x) if self.again is None else self.again(x)


def build_model(comm: Communicator, again: bool, **options: Any) -> Any:
    keras.utils.set_random_seed(1)
    layer: Any = MoE(Experts(4, **{"hidden": 4, "balance": "none", "min_capacity": 1, **options}), comm)
    return layer, Block(layer, again)


def gradients(comm: Communicator, again: bool, compiled: bool, **options: Any) -> tuple[list[Any], Any]:
    layer, block = build_model(comm, again, **options)
    given = keras.Input((5, WIDTH))
    model = keras.Model(given, block(given))
    x = np.random.default_rng(comm.rank).normal(size=(ROWS, 5, WIDTH)).astype(np.float32)

    def run(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(model(x, training=True) ** 2)
        return tape.gradient(loss, [x, *(variable.value for variable in model.trainable_variables)])

    return (tf.function(run) if compiled else run)(tf.constant(x)), layer


@pytest.mark.parametrize("compiled", [False, True])
def test_recompute_grad(comm: Communicator, compiled: bool) -> None:
    """Regression: tokens counted twice, and recomputation used evaluation's capacity, so that gradients were wrong."""
    options = {"capacity_factor": 0.5, "eval_capacity_factor": 4.0}
    expected, layer = gradients(comm, False, compiled, **options)
    result, other = gradients(comm, True, compiled, **options)
    for one, gradient in zip(result, expected, strict=True):
        np.testing.assert_allclose(one, gradient, rtol=1e-6, atol=1e-7)
    np.testing.assert_array_equal(other.mixture.load, layer.mixture.load)
    assert other.stats() == layer.stats()


def test_recomputation_with_side_effects_is_refused(comm: Communicator) -> None:
    """Regression: router losses lost their gradient, and random numbers and masks changed in the recomputation."""
    with pytest.raises(UsageError, match=r"the router's loss has no gradient within tf.recompute_grad"):
        gradients(comm, True, False, balance="sequence")
    with pytest.raises(UsageError, match="draw different random numbers when they recompute"):
        gradients(comm, True, False, noise=1.0)
    _, block = build_model(comm, True)
    words = keras.Input((5,))
    model = keras.Model(words, block(keras.layers.Embedding(9, WIDTH, mask_zero=True)(words)))
    with tf.GradientTape() as tape:
        y = tf.reduce_sum(model(np.array([[1.0, 2.0, 0.0, 0.0, 0.0]]), training=True))
    with pytest.raises(UsageError, match="its mask is lost when"):
        tape.gradient(y, [variable.value for variable in block.trainable_variables])


def test_a_layer_created_in_a_scope_of_keras(comm: Communicator) -> None:
    """Regression: it had options that TensorFlow does not recompute in a graph, and was not built in one."""
    x = np.random.default_rng(comm.rank).normal(size=(ROWS, 5, WIDTH)).astype(np.float32)
    with keras.RematScope("full"):
        layer, _ = build_model(comm, False, hidden=4)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.function(layer)(x, training=True))
    assert tape.gradient(loss, layer.router.value) is not None
    assert layer.stats().tokens == comm.size * ROWS * 5


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_stages_that_recompute_count_tokens_once(comm: Communicator, schedule: Any) -> None:
    """Regression: statistics counted the tokens of a stage twice."""
    alone = comm.split(comm.rank)
    assert alone is not None
    keras.utils.set_random_seed(1)
    x = given = keras.Input((5, WIDTH))
    layers: list[Any] = [MoE(Experts(4, hidden=4), alone) for _ in range(comm.size)]
    for layer in layers:
        x = x + layer(x)
    pipe = pipeline(keras.Model(given, x), comm, schedule=schedule, microbatches=2, checkpoint="full")
    pipe.compile(keras.optimizers.SGD(0.1), "mse")
    batch = np.random.default_rng(0).normal(size=(4, 5, WIDTH)).astype(np.float32)
    pipe.fit(batch, batch, batch_size=4, shuffle=False, verbose=0)
    counted = [layer.stats().tokens for layer in layers]
    assert sum(comm.all_gather_object(sum(counted))) == 4 * 5 * comm.size
    pipe.close()
