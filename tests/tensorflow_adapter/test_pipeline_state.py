"""State that layers write in a forward, and optimizer state of each weight, match training without a pipeline."""

from __future__ import annotations

import warnings
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from commlib.errors import PeerError, UsageError
from commlib.pipeline.pipe import Split
from commlib_tensorflow import pipeline
from tests.inputs.keras_pipelines import (
    WIDTH,
    SingleProcess,
    assert_gradients,
    assert_weights,
    batch,
    filled,
    in_float64,
    layers,
    near,
)

__all__ = ["in_float64"]  # a fixture


class Writes(keras.layers.Layer):  # type: ignore[misc]  # Keras has no types
    """Writes a count, its input and a seed in each call, and in training a weight of its own."""

    def build(self, shape: Any) -> None:
        self.count = self.add_weight(shape=(), trainable=False, initializer="zeros", name="count")
        self.mean = self.add_weight(shape=shape[1:], trainable=False, initializer="zeros", name="mean")
        self.shift = self.add_weight(shape=shape[1:], name="shift")
        self.seeds = keras.random.SeedGenerator(7)

    def call(self, x: Any, training: bool = False) -> Any:
        self.count.assign_add(1.0)
        self.mean.assign(0.5 * self.mean + 0.5 * keras.ops.mean(x, 0))  # a gradient would flow to x
        before = 0.1 * self.shift
        if training:
            self.shift.assign(self.shift / keras.ops.norm(self.shift))
        return x - self.mean + self.count * before * self.shift + 0.1 * keras.random.normal((WIDTH,), seed=self.seeds)


def writing() -> Any:
    dense = [keras.layers.Dense(WIDTH, activation="tanh", name=f"d{number}") for number in range(4)]
    normalized = keras.layers.SpectralNormalization(dense[2], name="n")
    own = [dense[0], Writes(name="w0"), dense[1], normalized, Writes(name="w1"), dense[3]]
    return filled(keras.Sequential([keras.Input((WIDTH,)), *own]))


@pytest.mark.parametrize(
    ("name", "checkpoint", "eager"),
    [
        ("1f1b", "none", False),
        ("zb_h1", "selective", False),
        ("1f1b", "full", False),
        ("gpipe", "none", True),
        ("interleaved", "full", True),
    ],
)
def test_forwards_write_variables(comm: Any, name: Any, checkpoint: Any, eager: bool) -> None:
    """Regression: SpectralNormalization's kernel never changed, gradients passed through written variables, and

    evaluate and predict changed nothing. The reference is one process that processes the microbatches in turn.
    """
    alone = SingleProcess(writing(), "sgd")
    pipe = pipeline(writing(), comm, schedule=name, microbatches=3, checkpoint=checkpoint)
    pipe.compile(optimizer="sgd", loss="mse", run_eagerly=eager)
    for step in range(2):
        x, y = batch(8, step)
        near(pipe.step(x, y), alone.step(x, y, microbatches=3))
        assert_gradients(pipe, alone.gradients)
        assert_weights(pipe, alone.model)
        pipe.apply_gradients()
        alone.update()
        parts = [part for part in np.array_split(x, 3) if len(part)]
        near(pipe.predict_on_batch(x), np.concatenate([alone.model(part) for part in parts]))
        outputs = np.concatenate([alone.model(part) for part in parts])
        near(pipe.test_on_batch(x, y), np.mean((outputs - y) ** 2))
        assert_weights(pipe, alone.model)
    pipe.close()


def test_a_weight_with_several_versions_is_not_written(comm: Any) -> None:
    pipe = pipeline(writing(), comm, schedule="pipedream", microbatches=2, loss="mse", optimizer="sgd")
    with pytest.raises((UsageError, PeerError), match="" if comm.rank else r"writes its weight .* in its forward"):
        pipe.train_on_batch(*batch(4))
    pipe.close()


class Passing(keras.layers.Layer):  # type: ignore[misc]  # Keras has no types
    def build(self, shape: Any) -> None:
        self.last = self.add_weight(shape=(2, WIDTH), trainable=False, initializer="zeros", name="last")

    def call(self, x: Any) -> Any:
        self.last.assign(x)
        return x * 1.0


@pytest.mark.ranks(min=2)
def test_written_values_do_not_share_memory_with_messages(comm: Any) -> None:
    """Regression: a variable assigned an activation adopted the message's memory, which the next one overwrote."""
    model = keras.Sequential([keras.Input((WIDTH,)), *[Passing(name=f"p{n}") for n in range(comm.size)]])
    pipe = pipeline(model, comm, microbatches=2)
    x = np.random.default_rng(0).normal(size=(4, WIDTH))
    pipe.predict_on_batch(x)
    pipe.predict_on_batch(x * 0)
    kept = tf.identity(pipe.variables[0])
    pipe.predict_on_batch(x)
    near(pipe.variables[0], x[2:])
    near(kept, x[2:] * 0)
    pipe.close()


# Optimizers


def several() -> Any:
    """Three combined optimizers, one of which averages weights."""
    small = {".*bias": keras.optimizers.SGD(0.05, momentum=0.9), "(.*/)?d3/kernel": keras.optimizers.RMSprop(0.01)}
    average = keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.5)
    return keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(average, small))


def averaging() -> Any:
    rate = keras.optimizers.schedules.CosineDecay(0.1, 20)
    return keras.optimizers.SGD(
        rate, momentum=0.9, loss_scale_factor=8.0, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=3
    )


@pytest.mark.parametrize("make", [averaging, several])
def test_training_continues_with_other_stages(comm: Any, make: Any, tmp_path: Any) -> None:
    """Regression: averages belonged to other stages, a second save failed, and state of a MultiOptimizer was lost."""
    path = comm.broadcast_object(str(tmp_path), 0)
    x, y = batch(16)
    options: dict[str, Any] = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}
    whole, pipe = layers(4), pipeline(layers(4), comm, microbatches=2)
    for model in (whole, pipe):
        model.compile(optimizer=make(), loss="mse", run_eagerly=True)
        model.fit(x, y, **options)
    for time in range(2):
        pipe.save(f"{path}/{time}.keras")
        pipe.close()
        loaded = keras.models.load_model(f"{path}/{time}.keras")
        for got, expected in zip(loaded.optimizer.variables, whole.optimizer.variables, strict=True):
            near(got, expected, 1e-9)
        split: Split = [1, 3] if comm.size == 2 and not time else "auto"
        pipe = pipeline(loaded, comm, microbatches=4, split=split)
        pipe.compile(optimizer=loaded.optimizer, loss="mse", run_eagerly=True)
        optimizer: Any = pipe.optimizer
        kept = {variable.path for variable in optimizer.variables}
        own = sum(f"d{n}_" in path for n in range(4) for path in kept)
        assert comm.size == 1 or 0 < own < sum(f"d{n}_" in v.path for n in range(4) for v in whole.optimizer.variables)
        got, expected = (model.fit(x, y, **options).history["loss"] for model in (pipe, whole))
        near(got, expected, 1e-9)
        assert_weights(pipe, whole, 1e-9)
    pipe.close()


class Unsaved(keras.optimizers.SGD):  # type: ignore[misc]  # Keras has no types
    def __init__(self, what: int, **options: Any) -> None:
        super().__init__(**options)


def test_an_optimizer_that_cannot_be_saved_is_warned_of(comm: Any, tmp_path: Any) -> None:
    """Regression: the last save of a long training failed. Now training begins with a warning."""
    model = layers(comm.size)
    pipe = pipeline(model, comm, microbatches=2)
    other = keras.optimizers.SGD(momentum=0.9)
    other.build(layers(2).trainable_variables)
    with pytest.raises(UsageError, match=r"built for other weights, without this rank's .*/kernel"):
        pipe.compile(optimizer=other, loss="mse")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pipe.compile(optimizer=Unsaved(3, learning_rate=0.1), loss="mse")
    texts = [str(one.message) for one in caught if "cannot be rebuilt" in str(one.message)]
    assert len(texts) == (comm.rank == 0) and all("give it a get_config()" in text for text in texts)
    with pytest.raises(UsageError, match="cannot be rebuilt from its configuration"):
        pipe.save(f"{comm.broadcast_object(str(tmp_path), 0)}/never.keras")
    pipe.close()


def test_files_show_later_frozen_weights(comm: Any, tmp_path: Any) -> None:
    path = f"{comm.broadcast_object(str(tmp_path), 0)}/frozen.keras"
    model = layers(4)
    pipe = pipeline(model, comm, microbatches=2)
    model.layers[1].trainable = model.layers[3].trainable = False
    pipe.compile(optimizer="adam", loss="mse")
    pipe.fit(*batch(8), verbose=0)
    pipe.save(path)
    loaded = keras.models.load_model(path)
    assert [layer.trainable for layer in loaded.layers] == [True, False, True, False]
    assert len(loaded.optimizer.variables) == 2 + 2 * 4
    pipe.close()


def test_local_and_whole_weights(comm: Any) -> None:
    """Regression: `set_weights` refused the result of `gather_weights` by an unrelated Keras error."""
    pipe, other = pipeline(layers(4), comm, microbatches=2), layers(4, seed=1)
    pipe.compile("sgd", "mse", run_eagerly=True)
    own = pipe.get_weights()
    pipe.set_weights(other.get_weights())
    for got, expected in zip(pipe.gather_weights(), other.get_weights(), strict=True):
        near(got, expected)
    pipe.set_weights(own)
    assert_weights(pipe, layers(4))
    with pytest.raises(
        UsageError, match=r"set_weights: got 3 values; expected .* \(get_weights\), or 8 for the .* \(gather_weights\)"
    ):
        pipe.set_weights(own[:1] * 3)
    with pytest.raises(UsageError, match=r"value 0 has shape \(4,\), expected \(4, 4\)"):
        pipe.set_weights(other.get_weights()[::-1])
    assert_weights(pipe, layers(4))
    x, y = batch(8)
    stop = keras.callbacks.EarlyStopping("loss", patience=1, mode="max", restore_best_weights=True)
    pipe.fit(x, y, batch_size=8, epochs=3, callbacks=[stop], verbose=0)
    alone = SingleProcess(layers(4), "sgd")
    alone.step(x, y)
    alone.update()
    assert_weights(pipe, alone.model)
    for call in (lambda: pipe.quantize("int8"), lambda: pipe.export("nowhere")):
        with pytest.raises(UsageError, match=r"whole (model, before pipeline|one, on all ranks)"):
            call()
    pipe.close()
