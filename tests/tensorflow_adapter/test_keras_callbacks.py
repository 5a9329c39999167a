"""Horovod's callbacks, alone and in `fit`."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import commlib_tensorflow.keras as hvd
from commlib import horovod as core
from commlib.errors import MismatchError, UsageError

from .keras_oracle import assert_close, assert_same_everywhere, batch, mine, network, state_of, step, weights


def different(model: Any, rank: int) -> Any:
    """Give a model weights that differ among ranks."""
    model.set_weights([weight + rank for weight in model.get_weights()])
    return model


def attached(callback: Any, model: Any, steps: int | None = 4) -> Any:
    callback.set_model(model)
    callback.set_params({"steps": steps, "epochs": 4})
    return callback


def compiled(optimizer: Any) -> Any:
    return SimpleNamespace(optimizer=optimizer)


# Broadcast


def test_broadcast_before_the_first_batch(comm: Any) -> None:
    """In Horovod the first batch uses different weights on each rank; here it does not."""
    root = comm.size - 1
    model, alone = different(network(), comm.rank), different(network(), root)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1 + comm.rank, momentum=0.5))
    optimizer.build(model.trainable_variables)
    optimizer.momentums[0].assign(optimizer.momentums[0] + comm.rank)
    optimizer._iterations.assign(comm.rank)
    model.compile(optimizer, keras.losses.MeanSquaredError(dtype="float64"), run_eagerly=True)
    plain = keras.optimizers.SGD(0.1 + root, momentum=0.5)
    plain.build(alone.trainable_variables)
    plain.momentums[0].assign(plain.momentums[0] + root)
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(root)
    for trained, stepper, data in ((model, optimizer, mine(comm, batch(comm))), (alone, plain, batch(comm))):
        if trained is model:
            model.fit(*data, batch_size=len(data[0]), verbose=0, shuffle=False, callbacks=[callback])
        else:
            step(trained, stepper, data)
    assert callback.broadcast_done
    assert_close(model, alone)
    assert_same_everywhere([*weights(model), *state_of(optimizer)])
    assert int(optimizer.iterations) == root + 1


def test_broadcast_of_a_second_model(comm: Any) -> None:
    """Regression: a callback reused for another model, as in cross-validation, did nothing: replicas differed."""
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    for _ in range(2):
        model = different(network(), comm.rank)
        attached(callback, model).on_train_begin()
        assert_close(model, network())
    different(model, comm.rank)
    callback.on_train_begin()  # the same model: no second broadcast
    assert_close(model, different(network(), comm.rank))


@pytest.mark.ranks(min=2)
def test_broadcast_after_the_first_batch(comm: Any) -> None:
    """One rank has created its variables, the others have not: all wait for the first batch."""
    model = different(network(), comm.rank)
    model.built = comm.rank == 0
    model.optimizer = keras.optimizers.SGD(0.1 + comm.rank)
    callback = attached(hvd.callbacks.BroadcastGlobalVariablesCallback(0), model)
    callback.on_train_begin()
    assert_close(model, [weight + comm.rank for weight in weights(network())])
    model.built = True
    model.optimizer.build(model.trainable_variables)
    callback.on_train_batch_end(0)
    assert_close(model, network())
    assert float(model.optimizer.learning_rate) == pytest.approx(0.1)
    model.trainable_variables[0].assign_add(model.trainable_variables[0] * 0 + comm.rank)
    callback.on_train_batch_end(1)  # once is enough
    assert_close(weights(model)[:1], [weights(network())[0] + comm.rank])


def test_broadcast_does_not_change_local_variables_and_seeds(comm: Any) -> None:
    inputs = keras.layers.Input((3,))
    dropout = keras.layers.Dropout(0.5, seed=comm.rank)
    model = keras.Model(inputs, keras.layers.Dense(2)(dropout(inputs)))
    seed = dropout.seed_generator.state.numpy()
    different(model, comm.rank)
    kernel, bias = (variable.numpy() for variable in model.trainable_variables)
    local = model.trainable_variables[1]
    callback = attached(hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=[local]), model)
    callback.on_train_begin()
    assert_same_everywhere([model.trainable_variables[0].numpy()])
    np.testing.assert_array_equal(local.numpy(), bias)
    np.testing.assert_array_equal(dropout.seed_generator.state.numpy(), seed)
    assert comm.rank == 0 or (model.trainable_variables[0].numpy() != kernel).any()


# Metrics


def test_metric_average(comm: Any) -> None:
    callback = attached(hvd.callbacks.MetricAverageCallback(), None)
    logs = {"val_loss": float(comm.rank), "accuracy": np.float32(2 * comm.rank), "name": "kept"}
    if comm.rank % 2:
        logs = dict(reversed(logs.items()))  # each rank has its own order
    callback.on_epoch_end(0, logs)
    assert logs == {"val_loss": (comm.size - 1) / 2, "accuracy": comm.size - 1, "name": "kept"}


@pytest.mark.ranks(min=2)
def test_metrics_missing_on_one_rank(comm: Any) -> None:
    callback = attached(hvd.callbacks.MetricAverageCallback(), None)
    logs = {"loss": 1.0} if comm.rank else {"loss": 1.0, "val_loss": 2.0}
    with pytest.raises(MismatchError, match=r"rank 0 has the metrics \['loss', 'val_loss'\], but rank 1 \['loss'\]"):
        callback.on_epoch_end(0, logs)


# The learning rate


def rates(callback: Any, optimizer: Any, epochs: int = 4, steps: int = 4) -> list[float]:
    """Return the learning rate in each batch."""
    attached(callback, compiled(optimizer), steps).on_train_begin()
    results = []
    for epoch in range(epochs):
        callback.on_epoch_begin(epoch)
        for number in range(steps):
            callback.on_train_batch_begin(number)
            results.append(float(optimizer.learning_rate))
            callback.on_train_batch_end(number)
        logs: dict[str, float] = {}
        callback.on_epoch_end(epoch, logs)
        assert logs["lr"] == results[-1]
    return results


def test_schedule_in_steps() -> None:
    callback = hvd.callbacks.LearningRateScheduleCallback(0.5, lambda epoch: 0.5**epoch, start_epoch=1, end_epoch=3)
    result = rates(callback, keras.optimizers.SGD(1.0))
    np.testing.assert_allclose(result, [1.0] * 4 + [0.25] * 4 + [0.125] * 8)


def test_schedule_of_a_number() -> None:
    callback = hvd.callbacks.LearningRateScheduleCallback(0.5, 0.1, start_epoch=2, staircase=False)
    np.testing.assert_allclose(rates(callback, keras.optimizers.SGD(1.0)), [1.0] * 8 + [0.05] * 8, rtol=1e-6)


def test_schedule_in_batches() -> None:
    callback = hvd.callbacks.LearningRateScheduleCallback(2.0, lambda epoch: 1 / (1 + epoch), staircase=False)
    expected = [2.0 / (1 + number / 4) for number in range(16)]
    np.testing.assert_allclose(rates(callback, keras.optimizers.SGD(1.0)), expected, rtol=1e-6)


def test_warmup(comm: Any, capsys: Any) -> None:
    """The rate rises from that of one rank to that of all; each epoch ends with a round number."""
    callback = hvd.callbacks.LearningRateWarmupCallback(0.1 * comm.size, warmup_epochs=2, verbose=1)
    result = rates(callback, keras.optimizers.SGD(0.1 * comm.size))
    expected = [0.1 * (1 + (number + 1) / 8 * (comm.size - 1)) for number in range(8)]
    np.testing.assert_allclose(result, expected + [0.1 * comm.size] * 8, rtol=1e-6)
    printed = capsys.readouterr().out
    assert ("Epoch 2: finished gradual learning rate warmup to" in printed) == (comm.rank == 0)


def test_unknown_number_of_batches() -> None:
    callback = attached(hvd.callbacks.LearningRateWarmupCallback(0.1), compiled(keras.optimizers.SGD(0.1)), None)
    with pytest.raises(UsageError, match=r"LearningRateWarmupCallback.*pass steps_per_epoch"):
        callback.on_train_begin()


def test_a_rate_that_cannot_be_set() -> None:
    optimizer = keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5))
    callback = attached(hvd.callbacks.LearningRateScheduleCallback(0.5, 0.5), compiled(optimizer))
    with pytest.raises(UsageError, match="cannot set the learning rate"):
        callback.on_train_batch_begin(0)


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("correct", [True, False])
def test_momentum_correction(correct: bool, wrapped: bool) -> None:
    """Momentum sums past gradients times past rates; the first step after a change rescales it to the new rate.

    Horovod changes the number `momentum`, which a traced function does not notice.
    """
    inner = keras.optimizers.SGD(1.0, momentum=0.5)
    optimizer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=1.0) if wrapped else inner
    variable = keras.Variable(np.zeros(1), dtype="float32")
    optimizer.build([variable])
    take = tf.function(lambda: optimizer.apply([tf.ones(1)], [variable]))
    callback = hvd.callbacks.LearningRateScheduleCallback(1.0, lambda epoch: 0.1**epoch, momentum_correction=correct)
    attached(callback, compiled(optimizer))
    callback.on_epoch_begin(0)
    callback.on_train_batch_begin(0)
    take()  # velocity -1
    callback.on_epoch_begin(1)
    callback.on_train_batch_begin(0)
    take()  # velocity -0.5 * (0.1 or 1) - 0.1
    np.testing.assert_allclose(variable.numpy(), [-1 - (0.05 if correct else 0.5) - 0.1], rtol=1e-6)


@pytest.mark.parametrize(
    ("expected", "make"),
    [
        (
            "^LearningRateSchedule.*: initial_lr is 'x', expected a number",
            lambda of: of.LearningRateScheduleCallback("x", 0.5),
        ),
        ("multiplier is 'x', .* function of the epoch", lambda of: of.LearningRateScheduleCallback(0.1, "x")),
        ("start_epoch is 'x', expected a number", lambda of: of.LearningRateScheduleCallback(0.1, 0.5, "x")),
        ("^LearningRateWarmup.*: warmup_epochs is 'x'", lambda of: of.LearningRateWarmupCallback(0.1, "x")),
        ("local_variables is 3, expected variables", lambda of: of.BroadcastGlobalVariablesCallback(0, "", 3)),
        (r"local_variables is \[3\]", lambda of: of.BroadcastGlobalVariablesCallback(0, "", [3])),
        ("^CommitState.*: expected an elastic state, got int", lambda of: of.CommitStateCallback(3)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_arguments_of_another_type(expected: str, make: Any) -> None:
    """Regression: they failed in `fit`, with errors of Python."""
    with pytest.raises(UsageError, match=expected):
        make(hvd.callbacks.of(keras))


def test_adam_has_no_momentum_to_correct() -> None:
    optimizer = keras.optimizers.Adam(1.0)
    optimizer.apply([tf.ones(1)], [keras.Variable(np.zeros(1), dtype="float32")])
    before = state_of(optimizer)[2:]
    callback = attached(hvd.callbacks.LearningRateScheduleCallback(1.0, 0.1), compiled(optimizer))
    callback.on_train_batch_begin(0)
    assert float(optimizer.learning_rate) == pytest.approx(0.1)
    assert_close(state_of(optimizer)[2:], before, 0)


# Checkpoints


def test_best_model(comm: Any, tmp_path: Path) -> None:
    """Only rank 0 writes, although each rank has its own directory here."""
    model = network()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    callback = attached(hvd.callbacks.BestModelCheckpoint(monitor="val_loss", mode="min"), model)
    with pytest.raises(UsageError, match="pass filepath"):
        callback.on_train_begin()
    callback.filepath = str(tmp_path / "best.keras")
    callback.on_train_begin()
    start = weights(model)
    for epoch, loss in enumerate([2.0, 1.0, 3.0]):
        model.set_weights([weight + epoch for weight in start])
        callback.on_epoch_begin(epoch)
        callback.on_epoch_end(epoch, {"val_loss": loss})
    assert [path.name for path in tmp_path.iterdir()] == (["best.keras"] if comm.rank == 0 else [])
    if comm.rank == 0:
        assert_close(keras.models.load_model(callback.filepath), [weight + 1 for weight in start], 1e-6)


# Elastic


class State(SimpleNamespace):
    """A minimal state that counts commits."""

    commits = 0

    def commit(self) -> None:
        self.commits += 1


def test_one_file_of_several_ranks(comm: Any, tmp_path: Path, recwarn: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: Keras' ModelCheckpoint on all ranks wrote one file at once, and silently corrupted it."""
    monkeypatch.chdir(tmp_path)

    def save(path: str, optimizer: Any, kind: Any = keras.callbacks.ModelCheckpoint) -> list[str]:
        recwarn.clear()
        model = SimpleNamespace(optimizer=optimizer, save=lambda *_, **__: None)
        attached(kind(filepath=path), model).on_epoch_end(0, {"val_loss": 1.0})
        return [str(one.message) for one in recwarn if "ModelCheckpoint writes" in str(one.message)]

    own = hvd.DistributedOptimizer(keras.optimizers.SGD())
    result = save("best-{epoch:02d}.keras", own)
    assert len(result) == (comm.rank > 0)
    assert all(f"best-01.keras on rank {comm.rank}: if several ranks write" in one for one in result)
    assert not save(f"best-{comm.rank}.keras", own)
    assert not save("best.keras", own, hvd.callbacks.BestModelCheckpoint)
    assert not save("alone.keras", keras.optimizers.SGD())


def run(callbacks: list[Any], epochs: list[int], batches: int) -> list[tuple[int, int, int]]:
    """Imitate `fit`: return the batch, the epoch and the commits of the state after each batch and epoch."""
    state, seen = callbacks[0].state, []
    for callback in callbacks:
        callback.on_train_begin()
    for epoch in epochs:
        for callback in callbacks:
            callback.on_epoch_begin(epoch)
        for number in range(batches):
            for callback in callbacks:
                callback.on_train_batch_end(number)
            seen.append((state.batch, state.epoch, state.commits))
        for callback in callbacks:
            callback.on_epoch_end(epoch)
        seen.append((state.batch, state.epoch, state.commits))
    return seen


def elastic(state: State) -> list[Any]:
    return [
        hvd.elastic.UpdateBatchStateCallback(state),
        hvd.elastic.UpdateEpochStateCallback(state),
        hvd.elastic.CommitStateCallback(state, batches_per_commit=2),
    ]


def test_elastic_callbacks() -> None:
    seen = run(elastic(State(batch=0, epoch=0)), [0, 1], 3)
    assert seen[:4] == [(1, 0, 0), (2, 0, 1), (3, 0, 1), (0, 1, 2)]
    assert seen[4:] == [(1, 1, 2), (2, 1, 3), (3, 1, 3), (0, 2, 4)]


@pytest.mark.parametrize("first", [0, 5])
def test_elastic_callbacks_after_a_restart(first: int) -> None:
    """Two batches of epoch 5 were done; `fit` counts batches from 0, and epochs from 0 or from initial_epoch."""
    seen = run(elastic(State(batch=2, epoch=5)), [first, first + 1], 2)
    assert seen == [(3, 5, 0), (4, 5, 1), (0, 6, 2), (1, 6, 2), (2, 6, 3), (0, 7, 4)]


def test_keras_state(comm: Any) -> None:
    model = different(network(), comm.rank)
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9)), "mse")
    state: Any = hvd.elastic.KerasState(model, batch=comm.rank, epoch=0)
    state.sync()
    assert_close(model, network())
    assert state.batch == 0
    step(model, model.optimizer, mine(comm, batch(comm)))
    state.batch = 1
    state.restore()
    assert_close(model, network())
    assert state.batch == 0
    assert not np.abs(state_of(model.optimizer)[2]).any()
    step(model, model.optimizer, mine(comm, batch(comm)))
    state.commit()
    after = weights(model)
    step(model, model.optimizer, mine(comm, batch(comm, 1)))
    state.restore()
    assert_close(model, after, 0)


class FailsOnce(keras.callbacks.Callback):  # type: ignore[misc]
    """Interrupts epoch 1 once, like an operation on which ranks disagree."""

    failed = False

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.epoch == 1 and batch == 0 and not self.failed:
            self.failed = True
            raise MismatchError("they disagree")


@pytest.mark.parametrize(("who", "eagerly"), [("all", True), ("one", False)])
def test_training_continues_from_the_last_commit(comm: Any, who: str, eagerly: bool) -> None:
    """Regression: if one rank failed, the others waited for its gradients until COMMLIB_TIMEOUT, or for ever."""
    model, alone = network(), network()
    loss = keras.losses.MeanSquaredError(dtype="float64")
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.9)), loss, run_eagerly=eagerly)
    state: Any = hvd.elastic.KerasState(model, batch=0, epoch=0)
    data = [batch(comm, number) for number in range(2)]
    x, y = (np.concatenate(parts) for parts in zip(*(mine(comm, one) for one in data), strict=True))
    failing, starts = FailsOnce(), []
    failing.failed = who == "one" and comm.rank != comm.size - 1

    @hvd.elastic.run
    def train(state: Any) -> None:
        starts.append(state.epoch)
        model.fit(
            x,
            y,
            batch_size=len(x) // 2,
            epochs=3,
            initial_epoch=state.epoch,
            shuffle=False,
            verbose=0,
            callbacks=[
                failing,
                hvd.elastic.UpdateBatchStateCallback(state),
                hvd.elastic.UpdateEpochStateCallback(state),
                hvd.elastic.CommitStateCallback(state, batches_per_commit=100),
            ],
        )

    train(state)
    assert starts == [0, 1]
    assert (state.epoch, state.batch, failing.failed) == (3, 0, True)
    plain = keras.optimizers.SGD(0.05, momentum=0.9)
    for one in data * 3:
        step(alone, plain, one)
    assert_close(model, alone)
    assert_same_everywhere(model)


# All callbacks together, and values


def test_all_in_fit(comm: Any) -> None:
    model = different(network(), comm.rank)
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1 * comm.size, momentum=0.9)), "mse")
    x, y = mine(comm, batch(comm))
    history = model.fit(
        x,
        y,
        batch_size=2,
        epochs=3,
        shuffle=False,
        verbose=0,
        validation_data=(x, y),
        callbacks=[
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),
            hvd.callbacks.MetricAverageCallback(),
            hvd.callbacks.LearningRateWarmupCallback(0.1 * comm.size, warmup_epochs=2),
            hvd.callbacks.LearningRateScheduleCallback(0.1 * comm.size, 0.1, start_epoch=2),
        ],
    ).history
    assert_same_everywhere(weights(model))
    assert core.allgather_object(history) == [history] * comm.size
    assert history["lr"] == pytest.approx([0.05 + 0.05 * comm.size, 0.1 * comm.size, 0.01 * comm.size])


def test_values(comm: Any) -> None:
    assert hvd.allreduce(float(comm.rank)) == (comm.size - 1) / 2
    assert hvd.allreduce(np.float64(comm.rank), average=False) == sum(range(comm.size))
    np.testing.assert_array_equal(hvd.allreduce([1, comm.rank], op=hvd.Max), [1, comm.size - 1])
    assert hvd.allreduce(1.0, op=hvd.Sum, prescale_factor=2.0, postscale_factor=3.0) == 6.0 * comm.size
    np.testing.assert_array_equal(
        hvd.allgather(np.full(comm.rank, comm.rank)), np.repeat(np.arange(comm.size), np.arange(comm.size))
    )
    assert hvd.broadcast(comm.rank, comm.size - 1) == comm.size - 1
    np.testing.assert_array_equal(hvd.reducescatter(np.arange(comm.size), op=hvd.Sum), [comm.rank * comm.size])
    with pytest.raises(RuntimeError, match="eager"):
        hvd.broadcast_global_variables(0)
    with pytest.raises(UsageError, match="traced function"):
        tf.function(lambda: hvd.allreduce(1.0), autograph=False)()


def test_operations_on_values_return_tensors(comm: Any) -> None:
    """Regression: they returned arrays, which lack methods of the tensors that Horovod returns."""
    value = np.ones(comm.size, np.float32)
    results = [
        hvd.allreduce(value),
        hvd.allgather(value),
        hvd.broadcast(value, 0),
        hvd.reducescatter(value),
    ]
    assert all(isinstance(result, tf.Tensor) for result in results)
    assert [tuple(result.numpy().shape) for result in results] == [(comm.size,), (comm.size**2,), (comm.size,), (1,)]
