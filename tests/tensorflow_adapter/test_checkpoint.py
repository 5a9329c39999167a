"""Checkpoints: training resumed in new objects matches uninterrupted training to the last bit."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import commlib_tensorflow.keras as hvd
from commlib import Preemption
from commlib.errors import CommlibError, UsageError
from commlib_tensorflow.checkpoint import Checkpoint

PER_EPOCH, EPOCHS = 4, 3


@pytest.fixture
def folder(comm: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all ranks can access."""
    return Path(comm.broadcast_object(str(tmp_path_factory.mktemp("checkpoints"))))


def compiled(comm: Any, **options: Any) -> Any:
    """Return a model with dropout, as a new process creates it: equal on all ranks except for seeds."""
    keras.utils.set_random_seed(comm.rank)
    layers = keras.layers
    model = keras.Sequential(
        [layers.Input((6,)), layers.Dense(8, "tanh"), layers.Dropout(0.3, seed=comm.rank), layers.Dense(2)]
    )
    model.set_weights(hvd.broadcast_object(model.get_weights(), root_rank=0))
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.05), name="checkpointed", **options)
    model.compile(optimizer, "mse")
    return model


def data(comm: Any) -> Any:
    def batch(number: Any) -> Any:
        x = tf.random.stateless_normal((5, 6), (number, comm.rank))
        return x, x[:, :2]

    return tf.data.Dataset.counter().map(batch)


def fit(comm: Any, model: Any, done: int = 0, callbacks: Any = (), epochs: int = EPOCHS) -> None:
    model.fit(
        data(comm).skip(done),
        initial_epoch=done // PER_EPOCH,
        epochs=epochs,
        steps_per_epoch=PER_EPOCH,
        callbacks=list(callbacks),
        shuffle=False,
        verbose=0,
    )


def bits(model: Any) -> list[Any]:
    return [np.asarray(tf.convert_to_tensor(v)).tolist() for v in [*model.variables, *model.optimizer.variables]]


@pytest.mark.parametrize("options", [{}, {"compression": "topk:ratio=0.2", "compress_within_node": True}], ids=str)
def test_resumed_training_is_the_same(comm: Any, folder: Path, options: dict[str, Any]) -> None:
    straight = compiled(comm, **options)
    fit(comm, straight)
    stopped = compiled(comm, **options)
    fit(comm, stopped, epochs=1)
    Checkpoint(folder, model=stopped).save(PER_EPOCH)
    resumed = compiled(comm, **options)
    done = Checkpoint(folder, model=resumed).resume()
    assert done == PER_EPOCH
    fit(comm, resumed, done)
    assert bits(resumed) == bits(straight)


class Signal(keras.callbacks.Callback):  # type: ignore[misc]
    """Send a signal to the last rank at the end of a batch."""

    def __init__(self, comm: Any, epoch: int, batch: int) -> None:
        super().__init__()
        self._comm, self._when, self._epoch = comm, (epoch, batch), 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if (self._epoch, batch) == self._when and self._comm.rank == self._comm.size - 1:
            os.kill(os.getpid(), signal.SIGUSR1)


@pytest.mark.parametrize(
    ("epoch", "batch"),
    [
        pytest.param(1, 1, id="in an epoch"),
        pytest.param(0, PER_EPOCH - 1, id="at the end of one"),
    ],
)
def test_interrupted_fit_continues_in_the_middle_of_an_epoch(comm: Any, folder: Path, epoch: int, batch: int) -> None:
    straight = compiled(comm)
    fit(comm, straight)
    interrupted = compiled(comm)
    with Preemption() as preemption:
        leaving = hvd.callbacks.PreemptionCallback(preemption, folder, interrupted, PER_EPOCH)
        assert leaving.resume() == 0
        with pytest.raises(SystemExit) as left:
            fit(comm, interrupted, callbacks=[Signal(comm, epoch, batch), leaving])
    assert left.value.code == 75
    resumed = compiled(comm)
    with Preemption() as preemption:
        leaving = hvd.callbacks.PreemptionCallback(preemption, folder, resumed, PER_EPOCH, save_every=5)
        done = leaving.resume()
        assert done == epoch * PER_EPOCH + batch + 1
        fit(comm, resumed, done, [leaving])
    assert bits(resumed) == bits(straight)
    assert Checkpoint(folder, model=resumed).newest() == done + 5


def test_fit_that_starts_elsewhere_is_refused(comm: Any, folder: Path) -> None:
    model = compiled(comm)
    Checkpoint(folder, model=model).save(PER_EPOCH + 1)
    with Preemption() as preemption:
        leaving = hvd.callbacks.PreemptionCallback(preemption, folder, model, PER_EPOCH)
        assert leaving.resume() == PER_EPOCH + 1
        with pytest.raises(UsageError, match="5 batches are done, of 4 in an epoch: call fit with initial_epoch=1"):
            fit(comm, model, 0, [leaving])


def test_other_values(comm: Any, folder: Path) -> None:
    one, many = tf.Variable(comm.rank), [tf.Variable([1.0, 2.0]), tf.Variable(tf.constant([3, 4], tf.bfloat16))]
    Checkpoint(folder, one=one, many=many).save(1)
    for variable in (one, *many):
        variable.assign(tf.zeros_like(variable))
    assert Checkpoint(folder, one=one, many=many).resume() == 1
    assert (int(one), [v.numpy().tolist() for v in many]) == (comm.rank, [[1, 2], [3, 4]])
    with pytest.raises(
        UsageError, match=r"one was saved with different variables: expected \[\('float32', \(\)\)\], got"
    ):
        Checkpoint(folder, one=tf.Variable(1.0), many=many).resume()
    with pytest.raises(UsageError, match="step= is a int: expected a model, an optimizer, a variable or a list"):
        Checkpoint(folder, step=3)
    unbuilt = keras.Sequential([keras.layers.Dense(3)])
    with pytest.raises(UsageError, match="model is not built yet"):
        Checkpoint(folder, model=unbuilt).save(2)


def test_an_optimizer_by_itself(comm: Any, folder: Path) -> None:
    """Regression: optimizers of Keras 3 were taken for variables, since they have `assign`, and could not be saved."""

    def build(value: float) -> tuple[Any, Any]:
        variable = tf.Variable([value, 2.0])
        return variable, hvd.DistributedOptimizer(keras.optimizers.Adam(0.1, gradient_accumulation_steps=2))

    variable, optimizer = build(1.0)
    with pytest.raises(CommlibError, match=r"optimizer is not built yet: call its build"):
        Checkpoint(folder, variable=variable, optimizer=optimizer).save(1)
    for step in range(3):  # stops between the passes of a step
        optimizer.apply([tf.constant([step + 1.0, comm.rank])], [variable])
    Checkpoint(folder, variable=variable, optimizer=optimizer).save(3)
    other, another = build(5.0)
    another.build([other])
    assert Checkpoint(folder, variable=other, optimizer=another).resume() == 3
    for one, trained in ((optimizer, variable), (another, other)):
        one.apply([tf.constant([1.0, comm.rank])], [trained])
    assert other.numpy().tolist() == variable.numpy().tolist()
