"""Regularizers of divided weights and activities match one process, or are refused."""

from __future__ import annotations

from typing import Any

import keras
import pytest
import tensorflow as tf
from keras import ops
from keras.regularizers import L1, L1L2, L2

from commlib.errors import UsageError
from commlib.tensor_parallel import Column, Replicate, Row, Sequence
from commlib_tensorflow.tensor import gather_weights, parallelize
from tests.tensorflow_adapter.tensor_oracle import alone, in_float64, near, sequential, values

__all__ = ["in_float64"]

L = keras.layers
PLAN: Any = {"up": Column(parts=2), "down": Row()}


def norm(weight: Any) -> Any:
    return 0.1 * ops.sqrt(ops.sum(ops.square(weight)))


def mean(weight: Any) -> Any:
    return ops.mean(ops.square(weight - 1.0))


def orthogonal(weight: Any) -> Any:
    """Keras' own one computes in float32."""
    products = ops.matmul(ops.transpose(weight), weight)
    return 0.1 * ops.sum(ops.square(products - ops.eye(weight.shape[1], dtype=weight.dtype)))


def pair(up: Any = None, down: Any = None, **options: Any) -> Any:
    first = L.Dense(10, name="up", kernel_regularizer=up, bias_regularizer=mean, **options)
    halves = L.Lambda(lambda x: ops.tanh(ops.split(x, 2, -1)[0]) * ops.split(x, 2, -1)[1], output_shape=(5,))
    return sequential(first, halves, L.Dense(3, name="down", kernel_regularizer=down), shape=(4,))


def train(model: Any) -> Any:
    model.compile("sgd", "mse")
    x, y = values(6, 4), values(6, 3, seed=1)
    return model.fit(x, y, batch_size=3, epochs=2, shuffle=False, verbose=0).history["loss"]


@pytest.mark.parametrize(("up", "down"), [(orthogonal, mean), (norm, orthogonal)])
def test_regularizers_other_than_sums(comm: Any, up: Any, down: Any) -> None:
    """Regression: they were applied to a rank's part, and so had wrong gradients."""
    whole, own = pair(up, down), pair(up, down)
    parallelize(own, comm, PLAN)
    expected, weights = alone(comm, lambda: (train(whole), whole.get_weights()))
    near(train(own), expected)
    for got, other in zip(gather_weights(own), weights, strict=True):
        near(got, other)
    assert own.get_layer("up").get_config() == whole.get_layer("up").get_config()


@pytest.mark.parametrize("eager", [True, False])
def test_sums_over_elements_are_reported_for_the_whole(comm: Any, eager: bool) -> None:
    """Regression: each rank reported its part of the penalty: callbacks that use the loss made ranks diverge."""

    def fit(model: Any) -> Any:
        model.compile("sgd", "mse", run_eagerly=eager)
        x, y = values(4, 4), values(4, 3, seed=1)
        stop = keras.callbacks.EarlyStopping("loss", patience=0, min_delta=0.2)
        losses = model.fit(x, y, batch_size=4, epochs=4, shuffle=False, verbose=0, callbacks=[stop]).history["loss"]
        return [*losses, model.evaluate(x, y, verbose=0), *map(float, model.losses)]

    def make() -> Any:
        up = L.Dense(10, "tanh", name="up", kernel_regularizer=L1(0.1), bias_regularizer=L2(0.2))
        return sequential(up, L.Dense(3, name="down", kernel_regularizer=L1L2(0.1, 0.3)), shape=(4,))

    whole, own = make(), parallelize(make(), comm, {"up": Column(), "down": Row()})
    expected, weights = alone(comm, lambda: (fit(whole), whole.get_weights()))
    near(fit(own), expected)
    for got, other in zip(gather_weights(own), weights, strict=True):
        near(got, other)


def test_activity_regularizers(comm: Any) -> None:
    """For a sum, each rank has the gradient of its part; other functions cannot be computed from parts."""
    whole, own = pair(activity_regularizer="l2"), pair(activity_regularizer="l2")
    parallelize(own, comm, PLAN)
    x = tf.constant(values(3, 4))
    results = []
    for model in (whole, own):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x)) + model.losses[0]
        results.append(tape.gradient(loss, model.get_layer("up").kernel))
    near(comm.all_reduce(tf.norm(results[1]).numpy() ** 2), tf.norm(results[0]) ** 2)
    with pytest.raises(UsageError, match="its activity regularizer norm would see only this rank's shard"):
        parallelize(pair(activity_regularizer=norm), comm, PLAN)
    parallelize(pair(activity_regularizer=norm), comm, {"up": Column(gather=True)})
    with pytest.raises(UsageError, match="whose gradient would be added up"):
        parallelize(pair(activity_regularizer="l2"), comm, {"up": Replicate(into_sharded=True)})


@pytest.mark.parametrize("eager", [True, False])
def test_activity_is_reported_for_the_whole(comm: Any, eager: bool) -> None:
    """Regression: each rank reported its part of the output's penalty."""

    def make() -> Any:
        up = L.Dense(10, "tanh", name="up", activity_regularizer=L2(0.1))
        between = L.ActivityRegularization(l1=0.2, name="between")
        return sequential(up, between, L.Dense(3, name="down", activity_regularizer="l1"), shape=(4,))

    def fit(model: Any) -> Any:
        model.compile("sgd", "mse", run_eagerly=eager)
        x, y = values(4, 4), values(4, 3, seed=1)
        losses = model.fit(x, y, batch_size=2, epochs=2, shuffle=False, verbose=0).history["loss"]
        return [*losses, model.evaluate(x, y, verbose=0)]

    whole, own = make(), parallelize(make(), comm, {"up": Column(), "between": Sequence(-1), "down": Row()})
    expected, weights = alone(comm, lambda: (fit(whole), whole.get_weights()))
    near(fit(own), expected)
    for got, other in zip(gather_weights(own), weights, strict=True):
        near(got, other)
    for name in ("up", "between", "down"):
        assert own.get_layer(name).get_config() == whole.get_layer(name).get_config()


class Counted(keras.layers.Layer):  # type: ignore[misc]
    """A user-defined layer that adds to the loss."""

    def call(self, x: Any) -> Any:
        self.add_loss(ops.mean(ops.square(x)))
        return x


@pytest.mark.ranks(min=2)
def test_added_losses_of_divided_values(comm: Any) -> None:
    """Regression: a mean over this rank's part was taken for that of the whole."""

    def make(*between: Any) -> Any:
        return sequential(
            L.Dense(10, name="up"), *between, L.Dense(3, name="down"), L.ActivityRegularization(l1=0.1), shape=(4,)
        )

    with pytest.raises(UsageError, match=r"add_loss of counted.*this rank's shard alone"):
        parallelize(make(Counted(name="counted")), comm, {"up": Column(), "down": Row()})
    parallelize(make(L.ActivityRegularization(l2=0.1)), comm, {"up": Column(), "down": Row()})
    model = sequential(L.Dense(10, name="up"), L.Dense(3, name="down"), Counted(name="counted"), shape=(4,))
    parallelize(model, comm, {"up": Column(), "down": Row()})


def clipped(weight: Any) -> Any:
    return ops.clip(weight, -0.3, 0.3)


def centred(weight: Any) -> Any:
    return weight - ops.mean(weight)


def constrained(up: Any = None, down: Any = None, bias: Any = None) -> Any:
    first = L.Dense(6, "tanh", name="up", kernel_constraint=up, bias_constraint=bias)
    return sequential(first, L.Dense(3, name="down", kernel_constraint=down), shape=(4,))


@pytest.mark.parametrize(
    ("up", "down"),
    [
        (keras.constraints.MaxNorm(0.5, axis=0), keras.constraints.UnitNorm(axis=-1)),
        (clipped, keras.constraints.MinMaxNorm(0.2, 0.5, axis=1)),
    ],
)
def test_constraints_on_parts(comm: Any, up: Any, down: Any) -> None:
    """Regression: constraints of single elements, and norms of other dimensions than the divided one, were refused."""
    whole, own = (constrained(up, down, keras.constraints.NonNeg()) for _ in range(2))
    parallelize(own, comm, {"up": Column(), "down": Row()})
    expected, weights = alone(comm, lambda: (train(whole), whole.get_weights()))
    near(train(own), expected)
    for got, other in zip(gather_weights(own), weights, strict=True):
        near(got, other)


@pytest.mark.ranks(min=2)
def test_constraints_that_need_the_whole_are_refused(comm: Any) -> None:
    """The norm and the mean of a part differ from those of the whole."""
    norms = keras.constraints.MaxNorm, keras.constraints.UnitNorm, keras.constraints.MinMaxNorm
    wrong = [{"down": norm(axis=0)} for norm in norms] + [{"up": norms[0](axis=[0, 1])}, {"bias": norms[0]()}]
    for given in (*wrong, {"up": norms[0](axis=None)}, {"up": centred}, {"down": centred}):
        (where,) = given
        name = "up/bias" if where == "bias" else f"{where}/kernel"
        with pytest.raises(UsageError, match=f"{name} has a constraint, .* shard of dimension ."):
            parallelize(constrained(**given), comm, {"up": Column(), "down": Row()})
