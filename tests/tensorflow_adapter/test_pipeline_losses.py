"""Losses of Keras pipelines match one process for every kind of mean, or are refused."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from commlib.errors import UsageError
from commlib_tensorflow import pipeline
from tests.inputs.keras_pipelines import EXACT, WIDTH, batch, filled, in_float64, layers, near

__all__ = ["in_float64"]

LONG = 5
losses = keras.losses


def words(seed: int = 0) -> Any:
    """A model of words with a class for each word of a text."""
    own = [
        keras.Input((LONG,), dtype="int32"),
        keras.layers.Embedding(WIDTH, WIDTH),
        keras.layers.Dense(WIDTH, activation="tanh"),
        keras.layers.Dense(WIDTH),
    ]
    return filled(keras.Sequential(own), seed)


def texts(rows: int, seed: int = 1) -> tuple[Any, Any]:
    generator = np.random.default_rng(seed)
    x, y = generator.integers(0, WIDTH, (2, rows, LONG))
    return x, y


def ignored(rows: int) -> tuple[Any, Any]:
    x, y = texts(rows)
    y[: rows // 2, 1:] = -1
    y[-2:] = -1  # a microbatch without terms
    return x, y


def summed(target: Any, output: Any) -> Any:
    return tf.reduce_sum(tf.square(target - output))


def assert_matches_one_process(
    comm: Any, make: Any, loss: Any, x: Any, y: Any, *, eager: bool = True, **options: Any
) -> None:
    """Compare the results of fit and evaluate, and weights, with one process."""
    given: dict[str, Any] = {"batch_size": 8, "shuffle": False, "verbose": 0}
    weighed = {key: options.pop(key) for key in ("sample_weight", "class_weight") if key in options}
    whole = make()
    whole.compile(keras.optimizers.SGD(0.1), loss, run_eagerly=True)
    expected = whole.fit(x, y, epochs=1, **given, **weighed).history["loss"]
    pipe = pipeline(make(), comm, microbatches=4, **options)
    try:
        pipe.compile(keras.optimizers.SGD(0.1), loss, run_eagerly=eager)
        near(pipe.fit(x, y, epochs=1, **given, **weighed).history["loss"], expected)
        for got, value in zip(pipe.gather_weights(), whole.get_weights(), strict=True):
            near(got, value, EXACT)
        near(pipe.evaluate(x, y, batch_size=8, verbose=0), whole.evaluate(x, y, batch_size=8, verbose=0))
    finally:
        pipe.close()


SPARSE: dict[str, dict[str, Any]] = {
    "ignored": {"ignore_class": -1},
    "ignored, sum": {"ignore_class": -1, "reduction": "sum"},
    "ignored, by weights": {"ignore_class": -1, "reduction": "mean_with_sample_weight"},
}


@pytest.mark.parametrize("name", SPARSE)
def test_ignored_classes(comm: Any, name: str) -> None:
    """Regression: microbatches counted by their rows, although classes were ignored."""
    loss = losses.SparseCategoricalCrossentropy(from_logits=True, **SPARSE[name])
    assert_matches_one_process(comm, words, loss, *ignored(14))


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_weigh_defines_the_weights_of_microbatches(comm: Any, schedule: str) -> None:
    """It receives inputs and sample weights, too; a microbatch without terms does not count, even if it is 0/0."""

    def masked(target: Any, output: Any) -> Any:
        each = losses.sparse_categorical_crossentropy(tf.maximum(target, 0), output, from_logits=True)
        counted = tf.cast(target >= 0, each.dtype)
        return tf.reduce_sum(each * counted) / tf.reduce_sum(counted)

    def weigh(target: Any, inputs: Any, sample_weight: Any = None) -> float:
        assert inputs.shape == target.shape and sample_weight is None
        return float(tf.reduce_sum(tf.cast(target >= 0, tf.float64)))

    assert_matches_one_process(comm, words, masked, *ignored(14), weigh=weigh, schedule=schedule, eager=False)


MEANS: dict[str, Any] = {
    "sum": lambda: losses.MeanSquaredError(reduction="sum"),
    "by weights": lambda: losses.MeanSquaredError(reduction="mean_with_sample_weight"),
    "mean": lambda: losses.Huber(),
    "of rows, by hand": lambda: lambda target, output: tf.reduce_mean(tf.abs(target - output), -1),
    "dice of each row": lambda: losses.Dice(axis=(1,)),
}


@pytest.mark.parametrize(
    ("name", "weighed"),
    [
        ("sum", False),
        ("by weights", True),
        ("of rows, by hand", False),
        ("mean", False),
        ("mean", True),
        ("dice of each row", False),
        ("dice of each row", True),
        ("sum", True),
        ("of rows, by hand", True),
        ("by weights", False),
    ],
)
def test_reductions(comm: Any, name: str, weighed: bool) -> None:
    """Regression: a sum was refused, and so was a weighted mean without weigh=."""
    x, y = batch(13)
    weight = np.random.default_rng(3).random(13) if weighed else None
    assert_matches_one_process(comm, lambda: layers(4), MEANS[name](), x, y, sample_weight=weight, eager=weighed)


def test_weights_of_classes(comm: Any) -> None:
    x, y = batch(13)[0], np.arange(13) % WIDTH
    loss = losses.SparseCategoricalCrossentropy(from_logits=True)
    weight = {number: number + 0.5 for number in range(WIDTH)}
    assert_matches_one_process(comm, lambda: layers(4), loss, x, y, class_weight=weight)


@pytest.mark.parametrize("loss", ["dice", losses.Dice(), losses.Tversky(), losses.Circle()])
def test_losses_that_mix_rows_are_refused(comm: Any, loss: Any) -> None:
    """Regression: Dice was 0.0 instead of 205.6."""
    pipe = pipeline(layers(4), comm, microbatches=4)
    with pytest.raises(UsageError, match="is not a mean over the rows of a batch"):
        pipe.compile("sgd", loss)
    pipe.close()
    pipe = pipeline(layers(4), comm, microbatches=4, weigh="rows")
    pipe.compile("sgd", loss)
    pipe.close()


def correlated(target: Any, output: Any) -> Any:
    return tf.reduce_mean(output) * tf.reduce_mean(target)


@pytest.mark.parametrize(("loss", "remedy"), [(summed, 'weigh="sum"'), (correlated, "weigh=")])
def test_other_functions_are_checked(comm: Any, loss: Any, remedy: str) -> None:
    """Regression: a user-defined sum was divided by the number of microbatches."""
    pipe = pipeline(layers(4), comm, microbatches=4, loss=loss, optimizer="sgd")
    with pytest.raises(UsageError, match=remedy):
        pipe.step(*batch(8))
    with pytest.raises(UsageError, match=remedy):
        pipe.fit(*batch(8), verbose=0)
    pipe.close()
    if loss is summed:
        assert_matches_one_process(comm, lambda: layers(4), summed, *batch(13), weigh="sum")


def test_outputs_with_different_weights(comm: Any) -> None:
    def make() -> Any:
        x = keras.Input((WIDTH,))
        hidden = keras.layers.Dense(WIDTH, "tanh")(keras.layers.Dense(WIDTH, "tanh")(x))
        one, other = keras.layers.Dense(WIDTH, name="p")(hidden), keras.layers.Dense(WIDTH, name="q")(hidden)
        return filled(keras.Model(x, {"p": one, "q": other}))

    x, y = batch(13)
    targets = {"p": y, "q": y[::-1].copy()}
    both = {"p": losses.MeanSquaredError(reduction="sum"), "q": losses.MeanAbsoluteError(reduction="sum")}
    assert_matches_one_process(comm, make, both, x, targets)
    pipe = pipeline(make(), comm, microbatches=4)
    pipe.compile("sgd", {"p": losses.MeanSquaredError(reduction="sum"), "q": "mae"})
    if comm.size == 1 or comm.rank == pipe.pipe.last:
        with pytest.raises(UsageError, match="has a different weight in each"):
            pipe.step(x, targets)
    else:
        with pytest.raises(UsageError, match="see the error on that rank"):
            pipe.step(x, targets)
    pipe.close()
