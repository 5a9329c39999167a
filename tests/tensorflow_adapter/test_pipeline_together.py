"""Agreement of ranks: without it callbacks, metrics and layers of a Keras pipeline failed."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from commlib.errors import MismatchError, PeerError, UsageError
from commlib_tensorflow import pipeline
from tests.inputs.keras_pipelines import WIDTH, SingleProcess, assert_weights, batch, filled, in_float64, layers, near

__all__ = ["in_float64"]  # a fixture

OPTIONS: dict[str, Any] = {"batch_size": 8, "shuffle": False, "verbose": 0}


class Stop(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """Sets stop_training on one rank only."""

    def __init__(self, rank: int, *, within: bool) -> None:
        super().__init__()
        self._rank, self._within = rank, within

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._within and self.model.pipe.comm.rank == self._rank:
            self.model.stop_training = True

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if epoch == 1 and self.model.pipe.comm.rank == self._rank:
            self.model.stop_training = True


@pytest.mark.ranks(min=2)
def test_ranks_stop_together(comm: Any) -> None:
    """Regression: one rank's training step was matched with another's evaluation, and took its batch."""
    x, y = batch(16)
    pipe = pipeline(layers(comm.size), comm, microbatches=2, loss="mse", optimizer="sgd")
    history = pipe.fit(x, y, epochs=4, callbacks=Stop(comm.size - 1, within=False), **OPTIONS)
    assert len(history.history["loss"]) == 2
    callbacks = keras.callbacks.CallbackList([Stop(0, within=False)], model=pipe, add_history=True, epochs=4)
    assert len(pipe.fit(x, y, epochs=4, callbacks=callbacks, **OPTIONS).history["loss"]) == 2
    with pytest.raises(MismatchError, match=r"rank 0 has finished its epoch of fit, but rank 1 trains on a batch"):
        pipe.fit(x, y, callbacks=[Stop(0, within=True)], **OPTIONS)
    with pytest.raises(MismatchError, match=r"rank 0 evaluates a batch, but rank 1 predicts a batch"):
        if comm.rank:
            pipe.predict_on_batch(x)
        else:
            pipe.test_on_batch(x, y)
    near(pipe.predict_on_batch(x).shape, x.shape)
    pipe.close()


class Interrupt(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch == 2:
            raise KeyboardInterrupt


def test_one_backup_for_all_ranks(comm: Any, tmp_path: Any) -> None:
    """Regression: ranks created and deleted one folder at a time, and the file lacked the optimizer's state."""
    folder = comm.broadcast_object(str(tmp_path), 0) + "/backup"
    x, y = batch(16)
    make = lambda: keras.optimizers.SGD(0.1, momentum=0.9, use_ema=True)  # noqa: E731
    whole = layers(4)
    whole.compile(optimizer=make(), loss="mse", run_eagerly=True)
    whole.fit(x, y, epochs=4, **OPTIONS)
    for stopped in (True, False):
        pipe = pipeline(layers(4, seed=0 if stopped else 3), comm, microbatches=2)
        pipe.compile(optimizer=make(), loss="mse", run_eagerly=True)
        callbacks = [keras.callbacks.BackupAndRestore(folder)]
        if stopped:
            with pytest.raises(KeyboardInterrupt):
                pipe.fit(x, y, epochs=4, callbacks=[*callbacks, Interrupt()], **OPTIONS)
        else:
            assert len(pipe.fit(x, y, epochs=4, callbacks=callbacks, **OPTIONS).history["loss"]) == 2
            assert_weights(pipe, whole, 1e-9)
        pipe.close()
        comm.barrier()
    assert not tf.io.gfile.exists(folder)


def test_a_metric_with_earlier_state(comm: Any) -> None:
    """Regression: earlier values counted in the first epoch."""
    metric = keras.metrics.MeanSquaredError(name="again")
    metric.update_state([100.0], [0.0])
    pipe = pipeline(layers(max(2, comm.size)), comm, microbatches=2)
    pipe.compile(optimizer="sgd", loss="mse", metrics=[metric])
    history = pipe.fit(*batch(16), **(OPTIONS | {"batch_size": 16, "epochs": 2})).history
    near(history["again"], history["loss"])
    pipe.close()


def recurrent(rows: int, count: int) -> Any:
    names = [f"l{number}" for number in range(count)]
    lstm = [keras.layers.LSTM(WIDTH, stateful=True, return_sequences=name != names[-1], name=name) for name in names]
    return filled(keras.Sequential([keras.Input(batch_shape=(rows, 3, WIDTH)), *lstm]))


def test_stateful_layers_take_whole_batches(comm: Any) -> None:
    """Regression: evaluate and predict did not change their states; several microbatches failed within a step."""
    x, y = np.random.default_rng(0).normal(size=(2, 4, 3, WIDTH)), np.ones((4, WIDTH))
    whole, cut = (recurrent(4, max(2, comm.size)) for _ in range(2))
    with pytest.raises(UsageError, match=r"l0.* is stateful.* use microbatches=1"):
        pipeline(recurrent(4, max(2, comm.size)), comm, microbatches=2)
    alone, pipe = SingleProcess(whole, "sgd"), pipeline(cut, comm, microbatches=1, loss="mse", optimizer="sgd")
    for each in x:
        near(pipe.step(each, y), alone.step(each, y))
        near(pipe.predict_on_batch(each), alone.model(each))
        near(pipe.test_on_batch(each, y), np.mean((alone.model(each) - y) ** 2))
    pipe.close()


class Draws(keras.layers.Layer):  # type: ignore[misc]  # Keras has no types
    """Draws random numbers by itself, in training."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self._how, self._count = how, 0

    def call(self, x: Any, training: bool = False) -> Any:
        self._count += training
        if not training:
            return x
        if self._how == "count":
            return x * float(self._count)
        return x * (tf.random.uniform(x.shape, dtype=x.dtype) if self._how == "tensorflow" else np.random.rand())


@pytest.mark.parametrize(
    ("how", "eager"),
    [
        ("tensorflow", True),
        ("count", False),
        ("numpy", True),
        ("tensorflow", False),
        ("count", True),
        ("numpy", False),
    ],
)
def test_recomputation_is_deterministic_or_refused(comm: Any, how: str, eager: bool) -> None:
    """Regression: gradients belonged to other random numbers, or another constant, than the loss."""
    dense = [keras.layers.Dense(WIDTH, name=f"d{n}") for n in range(comm.size)]
    drawing = [layer for one in dense for layer in (one, Draws(how))]
    options: dict[str, Any] = {"optimizer": "sgd", "loss": "mse", "run_eagerly": eager}
    pipe = pipeline([keras.Input((WIDTH,)), *drawing], comm, microbatches=2, checkpoint="full")
    pipe.compile(**options)
    text = "when a backward recomputes" if comm.rank == comm.size - 1 else None  # others may get its error
    with pytest.raises((UsageError, PeerError), match=text):
        pipe.step(*batch(4))
    pipe.close()
    # Keras's own random numbers, and true constants, are the same.
    fine = [layer for one in dense for layer in (one, keras.layers.Dropout(0.5), keras.layers.LayerNormalization())]
    pipe = pipeline([keras.Input((WIDTH,)), *fine], comm, microbatches=2, checkpoint="full")
    pipe.compile(**options)
    for rows in (4, 4, 3):
        pipe.step(*batch(rows))
    pipe.close()


class Keeps(keras.layers.Layer):  # type: ignore[misc]  # Keras has no types
    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Any] = []

    def call(self, x: Any) -> Any:
        self.kept.append(x)
        return x * 1.0


@pytest.mark.ranks(min=2)
def test_values_kept_by_a_layer_do_not_change(comm: Any) -> None:
    """Regression: a kept activation was in a message's memory, which the next one overwrote."""
    keeping = [Keeps() for _ in range(comm.size)]
    pipe = pipeline([keras.Input((WIDTH,)), *keeping], comm, microbatches=2)
    pipe.compile(optimizer=None, loss="mse", run_eagerly=True)
    own = keeping[comm.rank]
    own.kept.clear()  # values from the creation of the model
    x = np.arange(4.0 * 4 * WIDTH).reshape(4, 4, WIDTH)
    for each in x:
        pipe.step(each, each)
    near(np.concatenate(own.kept), x.reshape(-1, WIDTH))
    pipe.close()


# Errors and models


class Raises(keras.optimizers.SGD):  # type: ignore[misc]  # Keras has no types
    now = False

    def apply(self, *arguments: Any, **options: Any) -> None:
        if self.now:
            raise ValueError("late")
        super().apply(*arguments, **options)


@pytest.mark.ranks(min=2)
def test_a_late_error_reaches_all_ranks(comm: Any) -> None:
    """Regression: others waited if one rank's program caught the error; now all continue if all catch it."""
    alone, optimizer = SingleProcess(layers(comm.size), "sgd"), Raises()
    pipe = pipeline(layers(comm.size), comm, microbatches=2)
    pipe.compile(optimizer=optimizer, loss="mse", metrics=["mae"], run_eagerly=True)
    for late in range(2):
        x, y = batch(8, late)
        pipe.train_on_batch(x, y)
        alone.step(x, y)
        alone.update()
        before = [variable.numpy() for variable in pipe.variables]
        optimizer.now = comm.rank == late
        with pytest.raises((ValueError, PeerError), match="late"):
            pipe.train_on_batch(x, y)
        comm.barrier()
        optimizer.now = False
        for variable, value in zip(pipe.variables, before, strict=True):
            variable.assign(value)
        pipe.zero_gradients()
        assert_weights(pipe, alone.model)
    near(pipe.predict_on_batch(x), alone.model(x))
    pipe.close()


class Breaks(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    def __init__(self, hook: str, comm: Any) -> None:
        super().__init__()
        if comm.rank == comm.size - 1:
            setattr(self, hook, self.raise_it)

    def raise_it(self, *arguments: Any, **options: Any) -> None:
        raise ValueError("of a callback")


@pytest.mark.ranks(min=2)
def test_errors_between_batches_reach_all_ranks(comm: Any) -> None:
    """Regression: the others continued to train, and raised errors that did not name the first one."""
    x, y = batch(16)
    pipe = pipeline(layers(comm.size), comm, microbatches=2)
    pipe.compile(optimizer="sgd", loss="mse", run_eagerly=True)

    def breaks() -> Any:
        yield x, y
        if comm.rank == 0:
            raise ValueError("of a generator")
        yield x, y

    last = comm.size - 1
    for call, text, rank in (
        (lambda: pipe.fit(x, y, callbacks=[Breaks("on_train_batch_end", comm)], **OPTIONS), "of a callback", last),
        (lambda: pipe.fit(x, y, callbacks=[Breaks("on_epoch_end", comm)], **OPTIONS), "of a callback", last),
        (lambda: pipe.predict(x, 8, callbacks=[Breaks("on_predict_batch_end", comm)], verbose=0), "of a callb", last),
        (lambda: pipe.fit(breaks(), steps_per_epoch=2, verbose=0), "of a generator", 0),
    ):
        with pytest.raises(Exception, match=text) as caught:
            call()
        assert comm.rank == rank or (
            isinstance(caught.value, PeerError) and f"rank {rank} has left" in str(caught.value)
        )
    near(pipe.evaluate(x, y, verbose=0), np.mean((pipe.predict(x, verbose=0) - y) ** 2))
    pipe.close()


class Doubled(keras.Sequential):  # type: ignore[misc]  # Keras has no types
    def call(self, x: Any, training: Any = None, mask: Any = None) -> Any:
        return 2.0 * super().call(x, training=training)


class DoubledModel(keras.Model):  # type: ignore[misc]  # Keras has no types
    def __call__(self, x: Any, *arguments: Any, **options: Any) -> Any:
        return 2.0 * super().__call__(x, *arguments, **options)


class Measures(keras.layers.Layer):  # type: ignore[misc]  # Keras has no types
    def __init__(self) -> None:
        super().__init__()
        self.seen = keras.metrics.Mean()

    def call(self, x: Any) -> Any:
        self.seen.update_state(keras.ops.mean(x))
        return x


def test_models_with_their_own_call(comm: Any) -> None:
    """Regression: a subclass of Sequential or of a functional model was cut as if it had no call of its own."""
    inner = [keras.layers.Dense(WIDTH, name="inner")]
    x = keras.Input((WIDTH,))
    for model, name in (
        (Doubled([keras.Input((WIDTH,)), *inner]), "call"),
        (DoubledModel(x, keras.layers.Dense(WIDTH)(x)), "__call__"),
    ):
        with pytest.raises(UsageError, match=f"overrides {name}"):
            pipeline(model, comm, microbatches=2)

    def nested() -> Any:
        ends = [keras.layers.Dense(WIDTH, name=f"d{n}") for n in range(2)]
        doubled = Doubled([keras.Input((WIDTH,)), keras.layers.Dense(WIDTH, name="doubled")])
        return filled(
            keras.Sequential([keras.Input((WIDTH,)), ends[0], doubled, ends[1], *(() if comm.size < 4 else inner)])
        )

    alone, pipe = SingleProcess(nested()), pipeline(nested(), comm, microbatches=2, loss="mse")
    near(pipe.step(*batch(6)), alone.step(*batch(6)))
    pipe.close()
    measuring = [Measures() for _ in range(comm.size)]
    pipe = pipeline([keras.Input((WIDTH,)), *measuring], comm, microbatches=2, loss="mse")
    with pytest.raises((UsageError, PeerError), match="metrics to compile" if comm.rank == 0 else None):
        pipe.step(*batch(4))
    pipe.close()
