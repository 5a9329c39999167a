"""Callers of single divided layers, and models made of them, were not checked: they silently got parts."""

from __future__ import annotations

import warnings
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from commlib.errors import UsageError
from commlib.tensor_parallel import Column, Plan, Row
from commlib_tensorflow.tensor import parallelize
from tests.inputs.keras_pipelines import filled
from tests.tensorflow_adapter.tensor_oracle import in_float64, near, sequential, values

__all__ = ["in_float64"]

L = keras.layers
PLAN: Plan = {"up": Column(), "down": Row()}
pytestmark = pytest.mark.ranks(min=2)


def plain() -> Any:
    given = keras.Input((6,))
    return filled(keras.Model(given, L.Dense(4, name="down")(L.Dense(8, "relu", name="up")(given))))


def divided(comm: Any) -> Any:
    return parallelize(plain(), comm, PLAN)


def test_models_made_of_divided_layers(comm: Any) -> None:
    model, x = divided(comm), values(3, 6)
    up, down = model.get_layer("up"), model.get_layer("down")
    parts = keras.Model(model.inputs[0], up.output)
    for model_of_parts in (parts, keras.Model(model.inputs[0], [model.output, up.output]), keras.Sequential([up])):
        with pytest.raises(UsageError, match=r"(?s)made of layers of a sharded model.*returns unsharded values"):
            model_of_parts(x)
    with pytest.raises(UsageError, match="made of layers of a sharded model"):  # each time, and while it is traced
        parts.predict(x, verbose=0)
    with pytest.raises(UsageError, match="takes all features"):
        keras.Model(model.inputs[0], filled(sequential(L.Dense(2), shape=(8,)))(up.output))(x)
    expected = plain()(x)
    near(keras.Sequential([up, down])(x), expected)
    near(keras.Model(model.inputs[0], [model.output * 2, model.output])(x, training=True)[0], expected * 2)
    given = keras.Input((6,))
    near(keras.Model(given, model(given) * 3)(x), expected * 3)


def test_a_model_of_parts_can_be_allowed(comm: Any) -> None:
    model = parallelize(plain(), comm, PLAN, divided_output=True)
    whole, x = plain(), values(3, 6)
    own = np.array_split(np.asarray(keras.Model(whole.inputs[0], whole.get_layer("up").output)(x)), comm.size, -1)
    if 8 % comm.size == 0:
        near(keras.Model(model.inputs[0], model.get_layer("up").output)(x), own[comm.rank])


class Borrowing(keras.Model):  # type: ignore[misc]
    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def call(self, x: Any) -> Any:
        return self.layer(x)


@pytest.mark.parametrize("borrows", [False, True])
def test_a_layer_called_from_elsewhere_is_warned_of(comm: Any, borrows: bool) -> None:
    """Regression: a user-defined step that called a divided layer silently got a part."""
    model, x = divided(comm), values(3, 6)
    up = model.get_layer("up")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(x)
        for _ in range(2):
            (Borrowing(up) if borrows else up)(x)
    messages = [str(one.message) for one in caught if "outside of" in str(one.message)]
    assert len(messages) == (comm.rank == 0)
    assert all("up is called" in text and "this rank's shard" in text for text in messages)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        near(Borrowing(model)(x), plain()(x))


class Around(keras.Model):  # type: ignore[misc]
    """Contains a model, and calls its layers directly."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def call(self, x: Any) -> Any:
        return self.model.get_layer("down")(keras.ops.softmax(self.model.get_layer("up")(x)))


@pytest.mark.parametrize("first", [False, True])
def test_layers_called_by_the_owner_of_their_model_are_warned_of(comm: Any, first: bool) -> None:
    """Regression: a warning appeared only if the caller held the layers themselves."""
    model, x = divided(comm), values(3, 6)
    if first:
        near(Borrowing(model)(x), plain()(x))
    around = Around(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        around(x)
    messages = [str(one.message) for one in caught if "up is called" in str(one.message)]
    assert len(messages) == (comm.rank == 0)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("first", [False, True])
def test_a_modified_sequential_is_checked_again(comm: Any, first: bool, nested: bool) -> None:
    """Regression: layers added between divided ones, which took a part for the whole, were silently wrong."""
    x = values(3, 6)

    def build() -> tuple[Any, Any]:
        inner = sequential(L.Dense(8, "relu", name="up"), L.Dense(4, name="down"), shape=(6,))
        given = keras.Input((6,))
        return keras.Model(given, inner(given)) if nested else inner, inner

    (model, inner), (whole, reference) = build(), build()
    parallelize(model, comm, {f"{inner.name}/up": Column(), f"{inner.name}/down": Row()} if nested else PLAN)
    if first:
        near(model(x), whole(x))
    for one in (inner, reference):
        last = one.layers[-1]
        one.pop()
        one.add(L.Activation("tanh"))
        one.add(last)
    near(model(x), whole(x))  # a valid change passes
    last = inner.layers[-1]
    inner.pop()
    inner.add(L.Softmax())
    inner.add(last)
    for _ in range(2):
        with pytest.raises(UsageError, match=r"takes all features|needs a full dimension"):
            model(x)
    for _ in range(2):
        inner.pop()
    with pytest.raises(UsageError, match="returns unsharded values"):
        model(x)


class Dropping(keras.Model):  # type: ignore[misc]
    """Relies on Keras to pass the training flag to its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = L.Dense(8, name="up"), L.Dense(4, name="down"), L.BatchNormalization()

    def call(self, x: Any) -> Any:
        return self.norm(self.down(self.up(x)))


def test_the_first_call_trains(comm: Any) -> None:
    """Regression: the check before the first call ended Keras' call context: later layers were not in training mode."""
    model, x = Dropping(), values(3, 6)
    model(x)
    parallelize(filled(model), comm, PLAN)
    reference = Dropping()
    reference(x)
    near(model(x, training=True), filled(reference)(x, training=True))


class Recomputed(keras.Model):  # type: ignore[misc]
    """A divided block that a backward recomputes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = L.Dense(8, "relu", name="up"), L.Dense(4, name="down")

    def call(self, x: Any) -> Any:
        return tf.recompute_grad(lambda given: self.down(self.up(given)))(x)


def test_recomputation_may_call_divided_layers(comm: Any) -> None:
    """Regression: it was reported like a call from outside of the model."""
    model, x = Recomputed(), tf.constant(values(3, 6))
    model(x)
    parallelize(model, comm, PLAN)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x, training=True) ** 2)
        assert all(gradient is not None for gradient in tape.gradient(loss, model.trainable_variables))
