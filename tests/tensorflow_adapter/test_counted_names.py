"""Names with Keras' process-wide counters: ranks that have created different layers still communicate."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import commlib_tensorflow as hvd
from commlib import Communicator
from commlib.errors import MismatchError
from commlib.expert import Experts
from commlib_tensorflow import DistributedGradientTape, DistributedOptimizer, gather_weights
from commlib_tensorflow.expert import MoE, expertize

pytestmark = pytest.mark.ranks(min=2)
WIDTH, TOLERANCE = 4, 1e-5


def make_others(count: int) -> None:
    for _ in range(count):
        x = keras.Input((2,))
        keras.Sequential([keras.Model(x, keras.layers.Dense(1)(x)), hvd.SyncBatchNormalization()])


@pytest.fixture(autouse=True)
def other_numbers(comm: Communicator) -> Iterator[None]:
    """Make counters of layers differ among ranks, and be equal again after the test."""
    make_others(comm.rank)
    yield
    make_others(comm.size - 1 - comm.rank)
    keras.utils.set_random_seed(0)  # layers have drawn their values


def data(comm: Communicator) -> tuple[Any, Any, slice]:
    draw = np.random.default_rng(1)
    x, y = (draw.normal(size=(4 * comm.size, WIDTH)).astype(np.float32) for _ in range(2))
    return x, y, slice(4 * comm.rank, 4 * comm.rank + 4)


def model(norm: Any) -> Any:
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((WIDTH,)), keras.layers.Dense(WIDTH), norm, keras.layers.Dense(WIDTH)])


def test_layers_that_synchronise_in_fit(comm: Communicator) -> None:
    """Regression: they waited for each other for ever, under different names."""
    x, y, rows = data(comm)
    whole, built = model(keras.layers.BatchNormalization()), model(hvd.SyncBatchNormalization())
    names = comm.all_gather_object([layer.name for layer in built.layers])
    assert len(set(map(str, names))) == comm.size, "this test is of none"
    whole.compile(keras.optimizers.SGD(0.1), "mse")
    built.compile(DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    for _ in range(2):
        whole.train_on_batch(x, y)
        built.train_on_batch(x[rows], y[rows])
    for got, expected in zip(built.get_weights(), whole.get_weights(), strict=True):
        np.testing.assert_allclose(got, expected, rtol=TOLERANCE, atol=TOLERANCE)


def test_a_tape(comm: Communicator) -> None:
    built, (x, y, rows) = model(keras.layers.LayerNormalization()), data(comm)
    tape = DistributedGradientTape(tf.GradientTape())
    with tape:
        loss = tf.reduce_mean((built(x[rows]) - y[rows]) ** 2)
    with tf.GradientTape() as alone:
        whole = tf.reduce_mean((built(x) - y) ** 2)
    result, expected = (each.gradient(one, built.trainable_variables) for each, one in ((tape, loss), (alone, whole)))
    for got, wanted in zip(result, expected, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=TOLERANCE, atol=TOLERANCE)


def test_layers_in_another_order_are_refused(comm: Communicator) -> None:
    keras.utils.set_random_seed(0)
    first, second = keras.layers.Dense(WIDTH), keras.layers.Dense(WIDTH)
    order = [first, second] if comm.rank == 0 else [second, first]
    built = keras.Sequential([keras.Input((WIDTH,)), *order])
    tape = DistributedGradientTape(tf.GradientTape())
    x, y, rows = data(comm)
    with tape:
        loss = tf.reduce_mean((built(x[rows]) - y[rows]) ** 2)
    with pytest.raises(MismatchError, match=r"dense_\d+"):
        tape.gradient(loss, built.trainable_variables)


def test_alike_layers_frozen_differently_are_warned_of(comm: Communicator) -> None:
    """Rank 0 trains the first two of three equal layers, and the others the last two: rank 0 warns."""
    keras.utils.set_random_seed(0)
    dense = [keras.layers.Dense(WIDTH) for _ in range(3)]
    built = keras.Sequential([keras.Input((WIDTH,)), *dense])
    dense[0 if comm.rank else 2].trainable = False
    x, y, rows = data(comm)
    tape = DistributedGradientTape(tf.GradientTape())
    with tape:
        loss = tf.reduce_mean((built(x[rows]) - y[rows]) ** 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tape.gradient(loss, built.trainable_variables)
    assert any("if each freezes others, give them names" in str(one.message) for one in caught) is (comm.rank == 0)


@pytest.mark.parametrize("functional", [False, True])
def test_experts(comm: Communicator, functional: bool) -> None:
    """MLPs of a model become experts, or layers are constructed as experts."""
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(8, "relu"), keras.layers.Dense(WIDTH)]
    if functional:
        x = inputs = keras.Input((WIDTH,))
        for layer in layers:
            x = layer(x)
        mlp: Any = keras.Model(inputs, x)
    else:
        mlp = keras.Sequential([keras.Input((WIDTH,)), *layers])
    mlp.name = "mlp"
    built = keras.Sequential([keras.Input((WIDTH,)), keras.layers.Dense(WIDTH), mlp, keras.layers.Dense(WIDTH)])
    plain = keras.models.clone_model(built)
    plain.set_weights(built.get_weights())
    expertize(built, comm, {"mlp": Experts(2 * comm.size, top_k=2, copy=True)})
    x, y, rows = data(comm)
    np.testing.assert_allclose(built(x[rows]), plain(x[rows]), rtol=TOLERANCE, atol=TOLERANCE)
    built.compile(DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    built.train_on_batch(x[rows], y[rows])
    shared = comm.all_gather_object([each.tolist() for each in gather_weights(built)])
    assert all(each == shared[0] for each in shared)
    layer = MoE(Experts(2 * comm.size, hidden=3), comm)
    assert layer(x[rows]).shape == (4, WIDTH)
