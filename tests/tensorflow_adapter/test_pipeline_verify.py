"""Verification compares a cut Keras model with the whole one, without side effects."""

from __future__ import annotations

import random
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from commlib.errors import MismatchError, UsageError
from commlib_tensorflow import pipeline
from commlib_tensorflow.pipelines._parts import StageLayer
from tests.inputs.keras_pipelines import WIDTH, batch, filled, in_float64, layers, near

__all__ = ["in_float64"]  # a fixture


class Traced(keras.layers.Layer):  # type: ignore[misc]  # Keras has no types
    """Leaves traces in every way in which a call can."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seen, self.cache = 0, [0], {"last": 0}
        self.seeds = keras.random.SeedGenerator(5)

    def build(self, shape: Any) -> None:
        self.count = self.add_weight(shape=(), trainable=False, initializer="zeros", name="count")

    def call(self, x: Any, training: bool = False) -> Any:
        self.calls += 1
        self.seen.append(self.calls)
        self.cache["last"] = self.calls
        self.later = random.random() + np.random.rand()
        self.count.assign_add(1.0)
        self.add_loss(0.1 * keras.ops.mean(x**2))
        return x + self.count + (keras.random.normal((WIDTH,), seed=self.seeds) if training else 0.0)

    def traces(self) -> Any:
        python, numbers = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
        return self.calls, list(self.seen), dict(self.cache), hasattr(self, "later"), len(self.losses), python, numbers


def model() -> tuple[Any, Traced]:
    """A model with skips, masks, statistics, dropout, tied weights, regularisers and side effects."""
    words = keras.Input((5,), dtype="int32", name="words")
    early = keras.layers.Embedding(7, WIDTH, mask_zero=True, name="embed")(words)
    tied = keras.layers.Dense(WIDTH, activation="tanh", kernel_regularizer="l2", name="tied")
    x = keras.layers.BatchNormalization(name="norm")(keras.layers.Dropout(0.3, seed=3, name="drop")(tied(early)))
    x = keras.layers.GRU(WIDTH, name="gru")(keras.layers.Add(name="skip")([x, early]))
    traced = Traced()
    x = keras.layers.SpectralNormalization(keras.layers.Dense(WIDTH, name="inner"), name="spectral")(traced(x))
    return filled(keras.Model(words, {"a": keras.layers.Dense(3, name="a")(x), "b": tied(x)})), traced


@pytest.mark.parametrize("how", ["verify", "measure"])
def test_verification_leaves_no_trace(comm: Any, how: str) -> None:
    """Regression: measuring called layers, which counted the calls and kept their inputs."""
    whole, traced = model()
    x = np.random.default_rng(0).integers(1, 7, size=(6, 5))
    x[:3, 3:] = 0
    before = traced.traces(), [np.array(tf.identity(v.value)) for v in whole.variables]
    measured = {"example": x if comm.rank == 0 else None, "split": "time"}
    pipe = pipeline(whole, comm, microbatches=2, **({"verify": x} if how == "verify" else measured))
    assert traced.traces() == before[0]
    for variable, value in zip(whole.variables, before[1], strict=True):
        np.testing.assert_array_equal(np.array(tf.identity(variable.value)), value)
    assert not any(gradient is not None for gradient in pipe.gradients)
    pipe.close()


def test_a_batch_can_be_verified(comm: Any) -> None:
    x, y = batch(8)
    pipe = pipeline(layers(2 * comm.size), comm, microbatches=3, loss="mse", optimizer="sgd", verify=(x, y))
    near(pipe.test_on_batch(x, y), np.mean((np.array(layers(2 * comm.size)(x)) - y) ** 2))
    pipe.close()


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ("value", r"in training: the output of d1 1.0 \(stage \d\) differs"),
        ("gradient", r"in training: the gradient of .*kernel \(stage \d\) is missing"),
        ("state", r"in training: .*count \(stage \d\) after it differs"),
        ("evaluation", r"in evaluation: the output of d1 1.0 \(stage \d\) differs"),
    ],
)
def test_a_difference_is_named(comm: Any, wrong: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = StageLayer.call

    def call(part: StageLayer, values: Any, training: bool | None = None) -> Any:
        built = plain(part, values, training=training)
        for name, value in built.items():
            if wrong == "value" or (wrong == "evaluation" and not training):
                built[name] = value * 1.01 if name == "d1 1.0" else value
            elif wrong == "gradient":
                built[name] = tf.stop_gradient(value)
        for variable in part.non_trainable_variables:
            if wrong == "state" and variable.name == "count":
                variable.assign_add(1.0)
        return built

    dense = [keras.layers.Dense(WIDTH, name=f"d{n}") for n in range(4 if comm.size < 4 else 8)]
    monkeypatch.setattr(StageLayer, "call", call)
    traced = Traced()
    own = keras.Sequential([keras.Input((WIDTH,)), *dense, traced])
    before = traced.traces()
    for option in ("verify", "example") if wrong == "value" else ("verify",):
        with pytest.raises(UsageError, match=f"the cut model differs from the original, {text}"):
            pipeline(own, comm, microbatches=2, split=[2, *[1] * (comm.size - 2), len(dense) - comm.size + 1]
                     if comm.size > 1 else "auto", **{option: batch(4)[0]})  # fmt: skip

        assert traced.traces() == before, "looking has left a trace"


@pytest.mark.ranks(min=2)
def test_different_batches_on_ranks_are_refused(comm: Any) -> None:
    with pytest.raises(MismatchError, match=r"verify: .* is .a value of the batch"):
        pipeline(layers(comm.size), comm, microbatches=2, verify=batch(4, seed=comm.rank)[0])


class Random(keras.layers.Layer):  # type: ignore[misc]  # Keras has no types
    def call(self, x: Any, training: bool = False) -> Any:
        return x * tf.random.uniform(tf.shape(x), dtype=x.dtype) if training else x


def test_a_nondeterministic_model_is_not_compared(comm: Any) -> None:
    """A model with random numbers of its own differs from call to call, cut or not."""
    model = [keras.Input((WIDTH,)), *[Random() for _ in range(2 * comm.size)]]
    pipeline(model, comm, microbatches=2, verify=batch(4)[0]).close()
