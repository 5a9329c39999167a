"""Inputs and outputs of a Keras pipeline's step: places of rows, and details."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from commlib.errors import CommlibError, UsageError
from commlib_tensorflow import pipeline
from tests.inputs.keras_pipelines import (
    WIDTH,
    SingleProcess,
    assert_gradients,
    batch,
    filled,
    in_float64,
    key,
    layers,
    near,
)

__all__ = ["in_float64"]


class Turn(keras.layers.Layer):  # type: ignore[misc]  # Keras has no types
    """Exchange the first two dimensions."""

    def call(self, x: Any) -> Any:
        return tf.transpose(x, (1, 0, 2))


class Place(keras.layers.Layer):  # type: ignore[misc]  # Keras has no types
    """Add an input that applies to all rows."""

    def call(self, x: Any, places: Any) -> Any:
        return tf.tanh(x + places[:, None])


def model() -> Any:
    x, places = keras.Input((8, WIDTH), name="x"), keras.Input(batch_shape=(8,), name="places")
    hidden = Place()(keras.layers.Dense(WIDTH, name="first")(x), places)
    return filled(keras.Model([x, places], [hidden, Turn()(keras.layers.Dense(WIDTH, name="second")(hidden))]))


def test_rows_in_other_dimensions(comm: Any) -> None:
    """Regression: an input without rows was cut, and outputs were joined along the first dimension."""
    generator = np.random.default_rng(0)
    x, places = generator.normal(size=(8, 8, WIDTH)), generator.normal(size=8)
    y = [generator.normal(size=(8, 8, WIDTH)), generator.normal(size=(8, 8, WIDTH))]
    whole = model()
    with tf.GradientTape() as tape:
        outputs = whole([tf.constant(x), tf.constant(places)])
        expected = sum(tf.reduce_mean(tf.square(output - target)) for output, target in zip(outputs, y, strict=True))
    gradients = tape.gradient(expected, whole.trainable_variables)
    rows = {"x": (0, "whole"), "y": [0, 1], "output": [0, 1]}
    pipe = pipeline(model(), comm, microbatches=4, loss=["mse", "mse"], optimizer="sgd", rows=rows)
    result = pipe.step([x, places], y, outputs=True)
    near(result.loss, expected)
    assert len(result.losses) == 4
    near(np.mean(result.losses), expected)
    if comm.rank == pipe.pipe.last:
        for got, output in zip(result.outputs, outputs, strict=True):
            near(got, output)
    else:
        assert result.outputs is None
    named = zip(whole.trainable_variables, gradients, strict=True)
    assert_gradients(pipe, {key(variable): gradient for variable, gradient in named})
    for got, output in zip(pipe.predict_on_batch([x, places]), outputs, strict=True):
        near(got, output)
    pipe.close()
    pipe = pipeline(model(), comm, microbatches=4, rows={"x": (0, "whole")})
    with pytest.raises(CommlibError, match="a microbatch of 2 rows has output of shape"):
        pipe.predict_on_batch([x, places])
    pipe.close()


def test_invalid_rows_are_refused(comm: Any) -> None:
    with pytest.raises(UsageError, match="rows has 'all' for x"):
        pipeline(layers(4), comm, microbatches=2, rows={"x": "all"})
    pipe = pipeline(layers(4), comm, microbatches=2, loss="mse", rows={"x": (0, 0)})
    if comm.rank == pipe.pipe.first:
        with pytest.raises(UsageError, match="the model has 1 inputs"):
            pipe.step(*batch(4))
    else:
        with pytest.raises(UsageError, match=r"the batch of rank .* is invalid"):
            pipe.step(*batch(4))
    pipe.close()


def of_any_length() -> Any:
    dense = [keras.layers.Dense(WIDTH, activation="tanh", name=f"d{number}") for number in range(4)]
    return filled(keras.Sequential([keras.Input((None, WIDTH)), *dense, keras.layers.GlobalAveragePooling1D()]))


@pytest.mark.parametrize("weighted", [False, True])
def test_microbatches_can_be_given(comm: Any, weighted: bool) -> None:
    """Each has its own length, and there may be fewer than in the schedule. Regression: Keras' step cut all."""
    generator = np.random.default_rng(0)
    shapes = [(2, 5), (3, 2), (1, 7)]
    xs = [generator.normal(size=(*shape, WIDTH)) for shape in shapes]
    ys = [generator.normal(size=(rows, WIDTH)) for rows, _ in shapes]
    weights = [generator.uniform(size=rows) for rows, _ in shapes] if weighted else None
    whole = of_any_length()
    with tf.GradientTape() as tape:
        squares = [tf.reduce_mean((whole(tf.constant(x)) - y) ** 2, 1) for x, y in zip(xs, ys, strict=True)]
        terms = squares if weights is None else [own * w for own, w in zip(squares, weights, strict=True)]
        expected = tf.reduce_sum(tf.concat(terms, 0)) / 6
    gradients = tape.gradient(expected, whole.trainable_variables)
    pipe = pipeline(of_any_length(), comm, microbatches=4, loss="mse", optimizer="sgd")
    first, last = comm.rank == pipe.pipe.first, comm.rank == pipe.pipe.last
    given = (xs if first else None, ys if last else None, weights if last else None)
    for _ in range(2):
        pipe.zero_gradients()
        result = pipe.step(*given, cut=False, details=True)
        near(result.loss, expected)
        near(result.losses[:3], [tf.reduce_mean(own) for own in terms])
        named = zip(whole.trainable_variables, gradients, strict=True)
        assert_gradients(pipe, {key(variable): gradient for variable, gradient in named})
    pipe.close()


def test_invalid_microbatches_are_refused(comm: Any) -> None:
    """All ranks raise before communication, and can continue."""
    x, y = batch(4)
    pipe = pipeline(layers(4), comm, microbatches=2, loss="mse", optimizer="sgd")
    is_end = comm.rank in (pipe.pipe.first, pipe.pipe.last)
    text = (
        "expected a list of at most 2 microbatches, got 3 microbatches" if is_end else "the batch of rank .* is invalid"
    )
    with pytest.raises(UsageError, match=text):
        pipe.step([x] * 3, [y] * 3, cut=False)
    with pytest.raises(UsageError, match=r"of x have \[4, 4\] rows, microbatches of y \[3, 5\]"):
        pipe.step([x, x], [y[:3], np.concatenate([y, y[:1]])], cut=False)
    if comm.size > 1:
        with pytest.raises(CommlibError, match="trains on microbatches cut by the user"):
            pipe.step([x, x], [y, y], cut=comm.rank == 0) if comm.rank else pipe.step(x, y)
    near(pipe.step([x, x], [y, y], cut=False), pipe.step(x, y))
    pipe.close()


def test_a_list_of_inputs_is_shuffled(comm: Any) -> None:
    """Regression: a dataset took the list for one tensor, which fails for inputs of different dtypes."""

    def model() -> Any:
        inputs = [keras.Input((WIDTH,)), keras.Input((WIDTH,), dtype="int32")]
        cast = keras.layers.Lambda(lambda x: keras.ops.cast(x, "float64"), output_shape=(WIDTH,))
        hidden = keras.layers.Add()([keras.layers.Dense(WIDTH)(inputs[0]), keras.layers.Dense(WIDTH)(cast(inputs[1]))])
        return filled(keras.Model(inputs, keras.layers.Dense(WIDTH)(keras.layers.Dense(WIDTH)(hidden))))

    x, y = batch(8)
    given = [x, (x * 3).astype("int32")]
    whole, pipe = model(), pipeline(model(), comm, microbatches=2)
    for one in (whole, pipe):
        one.compile(keras.optimizers.SGD(0.1), "mse")
        one.fit(given, y, batch_size=8, epochs=2, verbose=0)  # one batch: its order does not matter
    for got, expected in zip(pipe.gather_weights(), whole.get_weights(), strict=True):
        near(got, expected)
    pipe.close()


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_a_batch_without_rows(comm: Any, schedule: Any) -> None:
    """Regression: the last stage's rank had no output to join, and failed without a message. Keras has a loss of 0, and

    gradients of 0, so that momentum acts.
    """
    (x, y), none, text = batch(8), np.zeros((0, WIDTH)), []
    whole, pipe = layers(4), pipeline(layers(4), comm, schedule=schedule, microbatches=3)
    for model in (whole, pipe):
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", metrics=["mae"], run_eagerly=True)
        text.append([model.train_on_batch(*given) for given in [(x, y), (none, none), (x, y), (none, none)]])
        text[-1].append(model.test_on_batch(none, none))
        assert model.predict_on_batch(none).shape == (0, WIDTH)
    near(text[1], text[0])
    for got, expected in zip(pipe.gather_weights(), whole.get_weights(), strict=True):
        near(got, expected)
    spec = tf.TensorSpec((None, WIDTH), tf.float64)
    last = tf.data.Dataset.from_generator(lambda: iter([(x, y), (none, none)]), output_signature=(spec, spec))
    near(pipe.evaluate(last, verbose=0), whole.evaluate(x, y, verbose=0))
    near(pipe.predict(last, verbose=0), whole.predict_on_batch(x))
    pipe.step(none, none)
    assert all(not np.any(gradient) for gradient in pipe.gradients)
    pipe.close()


@pytest.mark.parametrize("outputs", [1, 2])
def test_results_have_the_order_of_keras_on_all_ranks(comm: Any, outputs: int) -> None:
    """Regression: ranks without the last stage sorted them by name, so that mae was taken for mse."""
    x, y = batch(8)
    given = y if outputs == 1 else [y, 2 * y]
    losses: Any = "mse" if outputs == 1 else {"z": "mse", "a": "mae"}
    metrics: Any = ["mse", "mae"] if outputs == 1 else {"z": ["mse", "mae"], "a": ["mae"]}

    def build() -> Any:
        keras.utils.set_random_seed(0)
        begin = hidden = keras.Input((WIDTH,))
        for _ in range(4):
            hidden = keras.layers.Dense(WIDTH)(hidden)
        ends = [keras.layers.Dense(WIDTH, name=name)(hidden) for name in ("z", "a")[:outputs]]
        return keras.Model(begin, ends[0] if outputs == 1 else ends)

    whole, pipe = build(), pipeline(build(), comm, microbatches=2)
    reports = []
    for model in (whole, pipe):
        model.compile(keras.optimizers.SGD(0.01), losses, metrics=metrics, weighted_metrics=["mse"] * (outputs == 1))
        reports.append(
            [model.train_on_batch(x, given), model.test_on_batch(x, given), model.evaluate(x, given, verbose=0)]
        )
    near(reports[1], reports[0])
    assert (
        pipe.evaluate(x, given, verbose=0, return_dict=True).keys()
        == whole.evaluate(x, given, verbose=0, return_dict=True).keys()
    )
    pipe.close()


def test_sparse_and_ragged_tensors_are_refused(comm: Any) -> None:
    """Regression: TensorFlow's errors named neither the input nor a remedy; a list of sample weights, which Keras

    accepts as an array, was not cut.
    """
    x, y = batch(4)
    ragged = tf.RaggedTensor.from_row_splits(np.arange(16.0), range(0, 17, 4))
    weights, text = [1.0, 2.0, 3.0, 0.5], "Keras reads a list as a list of tensors"
    pipe = pipeline(layers(4), comm, microbatches=2, loss="mse", optimizer="sgd")
    name = pipe.pipe.first == comm.rank or comm.size == 1
    of_x: list[tuple[Any, str]] = [
        ((ragged, y), r"x: input .*: got a RaggedTensor, .*such as its to_tensor\(\)"),
        ((tf.sparse.from_dense(x), y), "x: input .*: got a SparseTensor, .*such as tf.sparse.to_dense"),
        ((np.array([[None] * WIDTH] * 4), y), "x: input .*: expected a tensor or an array, got ndarray"),
        ((x.tolist(), y), f"x has 16 tensors; the model has 1 inputs: .*{text}"),
    ]
    for given, expected in of_x:
        with pytest.raises(UsageError, match=expected if name else "the batch of rank 0 is invalid"):
            pipe.step(*given)
    others: list[tuple[Any, str]] = [
        ((x, ragged), "y: got a RaggedTensor"),
        ((x, y.tolist()), f"y: .* got single numbers .{text}"),
        ((x, 1.0), "y: .*got no tensor with rows"),
        ((x, y, tf.sparse.from_dense(weights)), "sample_weight: got a SparseTensor"),
    ]
    for given, expected in others:
        is_end = comm.rank in (pipe.pipe.first, pipe.pipe.last)
        with pytest.raises(UsageError, match=expected if is_end else r"the batch of rank .* is invalid"):
            pipe.step(*given)
    for call, expected in (
        (lambda: pipe.fit(ragged, y, verbose=0), "x: got a RaggedTensor"),
        (lambda: pipe.fit(x, y, sample_weight=weights, verbose=0), f"fit: expected tensors or arrays, .*{text}"),
        (lambda: pipe.fit(x, np.float64(1), verbose=0), "fit: expected arrays with rows"),
    ):
        with pytest.raises(UsageError, match=expected):
            call()
    near(pipe.step(x, y, weights), SingleProcess(layers(4)).step(x, y, np.array(weights)))
    pipe.close()
