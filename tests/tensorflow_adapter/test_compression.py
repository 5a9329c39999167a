"""Compressed gradients in TensorFlow: with tapes and Keras, eagerly and in graphs."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import commlib_tensorflow as hvd
import commlib_tensorflow.keras as hvd_keras
from commlib.compress import AllToAll, Blocks
from commlib.errors import UsageError
from commlib_tensorflow.optimizer import DistributedOptimizer
from tests.tensorflow_adapter.oracle import MODES, in_mode


def network() -> Any:
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((40,)), keras.layers.Dense(64, activation="tanh"), keras.layers.Dense(20)])


def data(comm: Any, step: int) -> Any:
    x = np.random.default_rng(100 * step + comm.rank).standard_normal((8, 40)).astype(np.float32)
    return tf.constant(x)


def train(comm: Any, model: Any, optimizer: Any, steps: range, mode: str = "eager") -> float:
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - x[:, :20]) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    optimizer.build(model.trainable_variables)
    run = in_mode(mode, step)
    for number in steps:
        loss = run(data(comm, number))
    return float(loss)


def weights(model: Any) -> list[bytes]:
    return [np.asarray(variable).tobytes() for variable in model.trainable_variables]


def assert_equal_everywhere(comm: Any, model: Any) -> None:
    everyone = comm.all_gather_object(weights(model))
    assert all(theirs == everyone[0] for theirs in everyone)


@pytest.mark.parametrize("name", ["int8", "topk:ratio=0.1"])
@pytest.mark.parametrize("mode", MODES)
def test_keras_trains_and_ranks_stay_equal(comm: Any, name: str, mode: str) -> None:
    model = network()
    optimizer = DistributedOptimizer(
        keras.optimizers.SGD(0.05), name=f"{name} {mode}", compression=name, compress_within_node=True
    )
    first = train(comm, model, optimizer, range(1), mode)
    assert train(comm, model, optimizer, range(1, 20), mode) < first
    assert_equal_everywhere(comm, model)
    if comm.size > 1:
        state = optimizer.compression_state()["parameters"]
        # In Keras' order of variables; with top-k the biases, which are small, travel uncompressed.
        assert sorted(state) == [f"variable {number}" for number in (range(4) if name == "int8" else (0, 2))]
        assert state["variable 0"]["residual"].shape == (40, 64)


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("overlap", [False, True])
def test_the_optimizer_of_the_keras_module(comm: Any, overlap: bool) -> None:
    """It has the arguments of horovod.keras in addition to ours."""
    model = network()
    optimizer: Any = hvd_keras.DistributedOptimizer(
        keras.optimizers.SGD(0.05),
        name=f"of keras {overlap}",
        compression="int8",
        compress_within_node=True,
        overlap=overlap,
        num_groups=2,
    )
    train(comm, model, optimizer, range(2), "graph")
    assert_equal_everywhere(comm, model)
    assert 3 * optimizer.report.sent_bytes < optimizer.report.uncompressed_bytes
    # In the second step, once ranks have agreed to restart; not in the last bucket, which has the flags.
    assert optimizer.statistics.early_launches == (1 if overlap else 0)


@pytest.mark.ranks(min=2)
def test_int8_is_close_to_training_without(comm: Any) -> None:
    exact, coarse = network(), network()
    train(comm, exact, DistributedOptimizer(keras.optimizers.SGD(0.05), name="exact", compression="none"), range(20))
    compressed = DistributedOptimizer(
        keras.optimizers.SGD(0.05), name="coarse", compression=AllToAll(Blocks(8)), compress_within_node=True
    )
    train(comm, coarse, compressed, range(20))
    for one, other in zip(exact.trainable_variables, coarse.trainable_variables, strict=True):
        # Feedback finally holds back less than one step's greatest gradient / 127 for each of two encodings.
        assert np.abs(np.asarray(one) - np.asarray(other)).max() < 2e-4
    assert weights(exact) != weights(coarse)


@pytest.mark.ranks(min=2)
def test_training_continues_from_a_saved_state(comm: Any) -> None:
    def make(name: str) -> Any:
        return DistributedOptimizer(
            keras.optimizers.SGD(0.05), name=name, compression="int4", compress_within_node=True
        )

    straight, stopped = network(), network()
    train(comm, straight, make("straight"), range(8))
    optimizer = make("stopped")
    train(comm, stopped, optimizer, range(5))
    state = optimizer.compression_state()
    again = make("stopped again")
    again.load_compression_state(state)
    train(comm, stopped, again, range(5, 8))
    assert weights(straight) == weights(stopped)


@pytest.mark.ranks(min=2)
def test_a_tape_compresses_too(comm: Any) -> None:
    variable = tf.Variable(tf.ones((30, 40)))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(variable) * float(comm.rank + 1)
    tape = hvd.DistributedGradientTape(tape, compression="int8", compress_within_node=True)
    gradient = tape.gradient(loss, [variable])[0]
    # All values of a block are equal, and int8 represents the greatest exactly, except for rounding of its scale.
    np.testing.assert_allclose(gradient, np.full((30, 40), (comm.size + 1) / 2), rtol=1e-6)


def test_unsupported_options_of_compression_by_name_are_refused() -> None:
    with pytest.raises(UsageError, match="unknown compression 'int3'"):
        DistributedOptimizer(keras.optimizers.SGD(0.05), compression="int3")
    with pytest.raises(UsageError, match="compression must be a name such as 'int8'"):
        DistributedOptimizer(keras.optimizers.SGD(0.05), compression=8)


@pytest.mark.ranks(min=2)
def test_auto_is_resolved_by_ranks_that_reduce_by_name(comm: Any) -> None:
    """Regression: the first step refused it as unknown."""
    model, alone = network(), network()
    optimizer = DistributedOptimizer(
        keras.optimizers.SGD(0.05), name="auto", compression="auto", compress_within_node=True
    )
    plain = DistributedOptimizer(keras.optimizers.SGD(0.05), name="not auto")
    assert train(comm, model, optimizer, range(3)) == pytest.approx(train(comm, alone, plain, range(3)), rel=1e-2)
    assert_equal_everywhere(comm, model)
    assert "a rank sends" in optimizer.compression_choice


def test_momentum_does_not_count_twice() -> None:
    with pytest.raises(UsageError, match=r"'dgc:ratio=0.1' includes momentum, but SGD has momentum 0.9"):
        DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.9), compression="dgc:ratio=0.1")
    with pytest.raises(UsageError, match=r"includes momentum, but Adam has beta_1 0.9, too: use SGD without momentum"):
        DistributedOptimizer(keras.optimizers.Adam(0.05), compression="dgc:ratio=0.1")
    with pytest.raises(UsageError, match=r"but Adam has beta_1 0.9"):
        DistributedOptimizer(
            keras.mixed_precision.LossScaleOptimizer(keras.optimizers.Adam(0.05)), compression="dgc:ratio=0.1"
        )
    optimizer: Any = DistributedOptimizer(keras.optimizers.SGD(0.05), compression="dgc:ratio=0.1")
    optimizer.momentum = 0.9
    variable = keras.Variable([1.0])
    with pytest.raises(UsageError, match=r"'dgc:ratio=0.1' includes momentum, but SGD has momentum 0.9"):
        optimizer.apply([tf.constant([1.0])], [variable])
