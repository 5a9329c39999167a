"""Optimizers of Keras 2 (tf_keras), new and legacy ones, and of TensorFlow 1."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import commlib_tensorflow as hvd
from commlib.errors import UsageError
from commlib_tensorflow.keras import elastic as keras_elastic
from commlib_tensorflow.keras._models import distribute_model
from commlib_tensorflow.keras.callbacks import of
from commlib_tensorflow.optimizer import DistributedOptimizer

from .keras_oracle import (
    ROWS,
    assert_changed,
    assert_close,
    assert_same_everywhere,
    batch,
    counted_reductions,
    error,
    mine,
    network,
    weights,
)

callbacks = of(tf_keras)


def mse(expected: Any, predicted: Any) -> Any:
    return error(predicted, expected)


def step(model: Any, optimizer: Any, data: Any, scale: float = 1.0) -> None:
    with tf.GradientTape() as tape:
        loss = error(model(data[0], training=True), data[1]) * scale
        if hasattr(optimizer, "get_scaled_loss"):
            loss = optimizer.get_scaled_loss(loss)
    gradients = tape.gradient(loss, model.trainable_variables)
    if hasattr(optimizer, "get_unscaled_gradients"):
        gradients = optimizer.get_unscaled_gradients(gradients)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))


@pytest.mark.parametrize("maker", ["MetricAverageCallback", "BestModelCheckpoint"])
def test_callbacks_of_keras_3_are_refused(comm: Any, maker: str) -> None:
    """Regression: they failed deep in tf_keras."""
    model = tf_keras.Sequential([tf_keras.layers.Dense(1, input_shape=[2])])
    model.compile("sgd", "mse")
    callback = getattr(of(keras), maker)()
    with pytest.raises(UsageError, match=rf"{maker}: .* model of tf_keras, but Keras 3 .*TF_USE_LEGACY_KERAS=1"):
        model.fit(np.ones([2, 2]), np.ones([2, 1]), verbose=0, callbacks=[callback])


def test_a_pipeline_of_keras_2_is_refused(comm: Any) -> None:
    model = tf_keras.Sequential([tf_keras.layers.Dense(1, input_shape=[2])])
    with pytest.raises(UsageError, match="got Sequential: models of Keras 2 cannot be split, use Keras 3"):
        hvd.pipeline(model, comm, microbatches=1)


MAKERS: dict[str, Any] = {
    "new": lambda: tf_keras.optimizers.Adam(0.05, global_clipnorm=0.5, jit_compile=False),
    "legacy": lambda: tf_keras.optimizers.legacy.SGD(0.1, momentum=0.9),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_fit_equals_one_process(comm: Any, kind: str) -> None:
    """All ranks start from rank 0's model, before the first batch."""
    model, alone, plain = network(tf_keras), network(tf_keras), MAKERS[kind]()
    model.set_weights([weight + comm.rank for weight in model.get_weights()])
    model.compile(DistributedOptimizer(MAKERS[kind]()), mse, run_eagerly=kind == "new")
    data = [batch(comm, number) for number in range(3)]
    shares = [np.concatenate(parts) for parts in zip(*(mine(comm, one) for one in data), strict=True)]
    broadcast = callbacks.BroadcastGlobalVariablesCallback(0)
    before = weights(alone)
    model.fit(*shares, batch_size=ROWS, shuffle=False, verbose=0, callbacks=[broadcast])
    for one in data:
        step(alone, plain, one)
    assert_changed(alone, before)
    assert_close(model, alone)
    assert_same_everywhere(model)
    assert isinstance(broadcast, tf_keras.callbacks.Callback)
    assert not isinstance(broadcast, keras.callbacks.Callback)


def test_it_is_the_same_object_of_the_same_class(comm: Any, tmp_path: Path) -> None:
    model, optimizer = network(tf_keras), MAKERS["new"]()
    assert DistributedOptimizer(optimizer) is optimizer
    assert optimizer.__class__ is tf_keras.optimizers.Adam
    with pytest.raises(UsageError, match="already"):
        DistributedOptimizer(optimizer)
    model.compile(optimizer, "mse")
    step(model, optimizer, mine(comm, batch(comm)))
    model.save(tmp_path / "model.keras")
    loaded = tf_keras.models.load_model(tmp_path / "model.keras")
    assert type(loaded.optimizer) is tf_keras.optimizers.Adam
    assert int(loaded.optimizer.iterations) == 1
    alone = tf_keras.models.load_model(tmp_path / "model.keras")
    distribute_model(loaded)
    step(loaded, loaded.optimizer, mine(comm, batch(comm, 1)))
    step(alone, alone.optimizer, batch(comm, 1))
    assert_close(loaded, alone)


@pytest.mark.parametrize(("graph", "average"), [(False, True), (True, False)])
def test_accumulation(comm: Any, monkeypatch: Any, average: bool, graph: bool) -> None:
    model, alone = network(tf_keras), network(tf_keras)
    optimizer = DistributedOptimizer(
        tf_keras.optimizers.SGD(0.1, momentum=0.9, jit_compile=False),
        backward_passes_per_step=2,
        average_aggregated_gradients=average,
    )
    plain = tf_keras.optimizers.SGD(0.1, momentum=0.9, jit_compile=False)
    take = tf.function(step) if graph else step
    with counted_reductions(monkeypatch) as begun:
        for update in range(2):
            start = weights(model)
            for number in (0, 1):
                assert_close(model, start, 0)
                data = mine(comm, batch(comm, 2 * update + number))
                take(model, optimizer, tuple(map(tf.constant, data)))
            whole = [np.concatenate(x) for x in zip(*(batch(comm, 2 * update + n) for n in (0, 1)), strict=True)]
            step(alone, plain, whole, scale=1 if average else 2)
            assert_close(model, alone)
    assert len(begun) == (2 if comm.size > 1 else 0)
    assert int(optimizer.iterations) == 4  # passes, as Horovod counts


@pytest.mark.parametrize(("kind", "nesting"), [("new", "outside"), ("new", "inside"), ("legacy", "outside")])
def test_overflow_on_one_rank(comm: Any, kind: str, nesting: str) -> None:
    """Keras 2 reduces before it checks for overflow, so that ranks agree without communication."""
    scaling = tf_keras.mixed_precision.LossScaleOptimizer
    model, alone, plain = network(tf_keras), network(tf_keras), scaling(MAKERS[kind]())
    if nesting == "outside":
        optimizer = scaling(DistributedOptimizer(MAKERS[kind]()))
    else:
        optimizer = DistributedOptimizer(scaling(MAKERS[kind]()))
    for number in range(4):
        start = weights(model)
        x, y = batch(comm, number)
        if number in (1, 2):
            x[number % comm.size * ROWS, 0] = np.inf
        step(model, optimizer, mine(comm, (x, y)))
        step(alone, plain, (x, y))
        if number in (1, 2):
            assert_close(model, start, 0)
        assert float(optimizer.loss_scale) == float(plain.loss_scale)
    assert float(optimizer.loss_scale) == 2.0**13
    assert_close(model, alone)
    assert_same_everywhere(model)
    broadcast = callbacks.BroadcastGlobalVariablesCallback(0)  # it includes the scale
    model.optimizer = optimizer
    if comm.rank:
        optimizer._loss_scale.current_loss_scale.assign(1.0)
    broadcast.set_model(model)
    broadcast.on_train_begin()
    assert float(optimizer.loss_scale) == 2.0**13


def test_accumulation_within_a_loss_scale_is_refused(comm: Any) -> None:
    inner = DistributedOptimizer(MAKERS["new"](), backward_passes_per_step=2)
    with pytest.raises(UsageError, match="LossScaleOptimizer of Keras 2"):
        step(network(tf_keras), tf_keras.mixed_precision.LossScaleOptimizer(inner), batch(comm))
    with pytest.raises(UsageError, match=r"backward_passes_per_step=2 .*legacy"):
        DistributedOptimizer(MAKERS["legacy"](), backward_passes_per_step=2)


def test_optimizers_of_tensorflow_1(comm: Any) -> None:
    model, alone = network(), network()
    for trained, optimizer, (x, y) in (
        (model, DistributedOptimizer(tf.compat.v1.train.MomentumOptimizer(0.1, 0.9)), mine(comm, batch(comm))),
        (alone, tf.compat.v1.train.MomentumOptimizer(0.1, 0.9), batch(comm)),
    ):
        variables = [variable.value for variable in trained.trainable_variables]
        for _ in range(2):
            optimizer.minimize(lambda trained=trained, x=x, y=y: error(trained(x), y), var_list=variables)
    assert_close(model, alone)
    assert_same_everywhere(model)


def test_a_session_of_tensorflow_1(comm: Any) -> None:
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        weight = tf.compat.v1.get_variable("weight", initializer=tf.constant([1.0 + comm.rank]))
        loss = tf.reduce_sum(weight * float(comm.rank))
        train = DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(1.0)).minimize(loss)
        start = hvd.broadcast_global_variables(0)
        session.run(tf.compat.v1.global_variables_initializer())
        session.run(start)
        assert session.run(weight) == [1.0]
        session.run(train)
        assert session.run(weight) == [1.0 - (comm.size - 1) / 2]


@pytest.mark.parametrize("make", [tf_keras.optimizers.SGD, tf_keras.optimizers.legacy.SGD])
def test_momentum_correction(make: Any) -> None:
    optimizer, variable = make(1.0, momentum=0.5), tf.Variable(np.zeros(1, np.float32))
    callback = callbacks.LearningRateScheduleCallback(1.0, lambda epoch: 0.1**epoch)
    callback.set_model(SimpleNamespace(optimizer=optimizer))
    for epoch in range(2):
        callback.on_epoch_begin(epoch)
        callback.on_train_batch_begin(0)
        optimizer.apply_gradients([(tf.ones(1), variable)])
    np.testing.assert_allclose(variable.numpy(), [-1 - 0.05 - 0.1], rtol=1e-6)


def test_metrics_and_warmup_in_fit(comm: Any) -> None:
    model = tf_keras.Sequential([tf_keras.layers.Dense(1)])  # without an input shape: built by the first batch
    model.compile(DistributedOptimizer(tf_keras.optimizers.SGD(0.1, jit_compile=False)), "mse", run_eagerly=True)
    history = model.fit(
        np.full((4, 2), comm.rank, np.float32),
        np.zeros((4, 1), np.float32),
        batch_size=2,
        epochs=2,
        verbose=0,
        callbacks=[
            callbacks.BroadcastGlobalVariablesCallback(0),
            callbacks.MetricAverageCallback(),
            callbacks.LearningRateWarmupCallback(0.1 * comm.size, warmup_epochs=2),
        ],
    ).history
    assert_same_everywhere(model)
    assert hvd.allgather_object(history) == [history] * comm.size
    assert history["lr"][-1] == pytest.approx(0.1 * comm.size)


@pytest.mark.parametrize("optimizer", ["new", "legacy", "none"])
def test_elastic_state(comm: Any, optimizer: str) -> None:
    model = tf_keras.Sequential([tf_keras.layers.Input((3,)), tf_keras.layers.Dropout(0.5), tf_keras.layers.Dense(2)])
    makes = {"new": tf_keras.optimizers.Adam, "legacy": tf_keras.optimizers.legacy.Adam}
    if optimizer in makes:
        model.compile(DistributedOptimizer(makes[optimizer]()), loss="mse")
    state: Any = keras_elastic.KerasState(model, epoch=comm.rank)
    state.sync()
    assert state.epoch == 0
    assert_same_everywhere(model.get_weights())
    saved = model.get_weights()
    model.set_weights([weight + 1 for weight in saved])
    state.restore()
    for got, expected in zip(model.get_weights(), saved, strict=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("mode", ["eager", "graph", "fit"])
@pytest.mark.parametrize("kind", [hvd.HorovodInternalError, keras_elastic.HostsUpdatedInterrupt])
def test_passes_restart_after_a_failure(comm: Any, mode: str, kind: type[Exception]) -> None:
    """Regression: passes from before a failure moved the restored model, and each update came a pass early."""
    model, alone = network(tf_keras), network(tf_keras)
    optimizer = DistributedOptimizer(tf_keras.optimizers.SGD(0.1), backward_passes_per_step=2)
    model.compile(optimizer, mse)
    state: Any = keras_elastic.KerasState(model, step=0)
    data = [batch(comm, number) for number in range(6)]
    raised: list[int] = []
    one_pass = tf.function(lambda x, y: step(model, optimizer, (x, y)))

    def reach(number: int) -> None:
        if state.step == 1 and number == 0 and not raised:
            raised.append(number)
            raise kind("on all ranks")

    class Fail(tf_keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            reach(batch)

    @keras_elastic.run
    def train(state: Any) -> None:
        while state.step < 3:
            shares = [mine(comm, one) for one in data[2 * state.step : 2 * state.step + 2]]
            if mode == "fit":
                x, y = (np.concatenate(parts) for parts in zip(*shares, strict=True))
                model.fit(x, y, batch_size=ROWS, shuffle=False, verbose=0, callbacks=[Fail()])
            else:
                for number, share in enumerate(shares):
                    one_pass(*map(tf.constant, share)) if mode == "graph" else step(model, optimizer, share)
                    reach(number)
            state.step += 1
            state.commit()

    train(state)
    plain = tf_keras.optimizers.SGD(0.1)
    for number in range(3):
        with tf.GradientTape() as tape:
            loss = sum(error(alone(x, training=True), y) for x, y in data[2 * number : 2 * number + 2])
        plain.apply_gradients(
            zip(tape.gradient(loss, alone.trainable_variables), alone.trainable_variables, strict=True)
        )
    assert raised == [0]
    assert_close(model, alone)
