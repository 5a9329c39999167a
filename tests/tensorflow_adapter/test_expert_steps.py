"""Steps of Keras' optimizers with experts: steps that make ranks diverge, or mix experts, are reported."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from commlib import Mesh
from commlib.errors import MismatchError
from commlib.expert import Experts
from commlib_tensorflow import (
    DistributedGradientTape,
    DistributedOptimizer,
    allreduce,
    broadcast_variables,
    clip_by_global_norm,
)
from commlib_tensorflow.expert import MoE

WIDTH = 4


@pytest.mark.parametrize(
    ("way", "graph"), [("plain", True), ("their norm", False), ("our norm", False), ("mixed", False), ("mixed", True)]
)
def test_unreduced_steps_are_reported(comm: Any, way: str, graph: bool) -> None:
    """Regression: with plain optimizers or TensorFlow's norm ranks silently diverged; reducing all mixed experts."""
    if comm.size == 1:
        return
    ranks = comm.split(0, name="together")  # repeats warnings that appear once per communicator
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((WIDTH,)), MoE(Experts(2 * comm.size, hidden=4), ranks)])
    optimizer = keras.optimizers.SGD(0.01, gradient_accumulation_steps=2 if way == "plain" else None)
    x = np.random.default_rng(comm.rank).standard_normal((6, WIDTH)).astype(np.float32)

    def step() -> None:
        plain = tf.GradientTape()
        with DistributedGradientTape(plain) if "norm" in way else plain as tape:
            loss = tf.reduce_sum(model(x, training=True) ** 2) + tf.add_n(model.losses)
        gradients = tape.gradient(loss, model.trainable_variables)
        if way == "mixed":
            gradients = [allreduce(gradient) for gradient in gradients]
        elif way == "their norm":
            gradients, _ = tf.clip_by_global_norm(gradients, 0.5)
        elif way == "our norm":
            gradients, _ = clip_by_global_norm(gradients, 0.5)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    expected: Any = contextlib.nullcontext()
    if way == "mixed":
        expected = pytest.raises(MismatchError, match=r"SGD of Keras .* which mixes them")
    elif way != "our norm":
        expected = pytest.warns(UserWarning, match=r"SGD of Keras .* diverge: the gradient of .*/router .*mesh=mesh")
    run = tf.function(step) if graph else step
    with expected, warnings.catch_warnings():
        if way == "our norm":
            warnings.simplefilter("error")
        for _ in range(2):
            run()


def test_each_optimizer_that_makes_ranks_diverge_is_reported(comm: Any) -> None:
    """Regression: only the first one of a process was reported."""
    if comm.size == 1:
        return
    x = np.random.default_rng(comm.rank).standard_normal((6, WIDTH)).astype(np.float32)
    for _ in range(2):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((WIDTH,)), MoE(Experts(2 * comm.size, hidden=4), comm)])
        optimizer = keras.optimizers.SGD(0.01)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x, training=True) ** 2) + tf.add_n(model.losses)
        gradients = tape.gradient(loss, model.trainable_variables)
        with pytest.warns(UserWarning, match=r"SGD of Keras .* diverge: the gradient of .*/router"):
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("graph", [False, True])
def test_different_values_on_ranks_are_reported(comm: Any, graph: bool) -> None:
    """Regression: weights outside a mixture that was inserted into a model depended on the rank's seed."""
    mesh = Mesh(dp=-1)
    for broadcasts in (False, True):
        keras.utils.set_random_seed(comm.rank)
        layers = [keras.layers.Dense(WIDTH, name="first"), MoE(Experts(2 * comm.size, hidden=4), mesh)]
        model = keras.Sequential([keras.Input((WIDTH,)), *layers])
        optimizer = DistributedOptimizer(keras.optimizers.SGD(0.1), mesh=mesh)
        if broadcasts:
            broadcast_variables(model.variables, 0)
        model.compile(optimizer, "mse", run_eagerly=not graph)
        x = np.random.default_rng(comm.rank).standard_normal((6, WIDTH)).astype(np.float32)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model.fit(x, x, batch_size=3, verbose=0)
        messages = [str(one.message) for one in caught if "different values of a weight" in str(one.message)]
        assert len(messages) == (not broadcasts), messages
        assert broadcasts or "first/kernel differs between rank 0 and rank" in messages[0]
    mesh.close()
