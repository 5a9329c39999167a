"""Zero weights hide errors: a plan was accepted, and became wrong once the weight changed."""

from __future__ import annotations

import warnings
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from commlib.errors import UsageError
from commlib.tensor_parallel import Column, Plan, Row
from commlib_tensorflow.tensor import gather_weights, parallelize
from tests.inputs.keras_pipelines import filled
from tests.tensorflow_adapter.tensor_oracle import in_float64, near, values

__all__ = ["in_float64"]  # a fixture

L = keras.layers
PLAN: Plan = {"up": Column(), "down": Row()}
LOOKED_AT = ["a graph", "verify", "a call", "example"]
X = tf.constant(values(3, 5, 8))


class Gated(keras.Model):  # type: ignore[misc]  # Keras has no types
    """Adds a value to the features or to the result by a gate that is zero at first."""

    def __init__(self, between: Any, shape: tuple[int, ...] = (), dtype: Any = None) -> None:
        super().__init__(dtype=dtype)
        self.up, self.down = L.Dense(12, name="up", dtype=dtype), L.Dense(8, name="down", dtype=dtype)
        self.norm = L.LayerNormalization(gamma_initializer="zeros", dtype=dtype)
        self.gate, self.after = self.add_weight(shape, "zeros"), self.add_weight((8,), "zeros")
        self.between = between

    def call(self, x: Any) -> Any:
        return x * (1 + self.gate) + self.norm(x) + self.after * self.down(self.between(self, self.up(x)))


class Turned(keras.Model):  # type: ignore[misc]
    """Fails or returns NaN if its weight is not zero."""

    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.up, self.down = L.Dense(12, name="up"), L.Dense(8, name="down")
        self.turn, self.fails = self.add_weight((), "zeros"), fails

    def call(self, x: Any) -> Any:
        if self.fails:
            x = tf.debugging.check_numerics(x / tf.cast(self.turn == 0, x.dtype), "turned")
        return self.down(keras.ops.softmax(self.up(x), 1)) + keras.ops.sqrt(-self.turn)


def spectrum(model: Any, h: Any) -> Any:
    result = tf.math.real(tf.signal.fft(tf.cast(h, tf.complex64 if h.dtype.size < 8 else tf.complex128)))
    return h + model.gate * tf.cast(result, h.dtype)


def relu(_: Any, h: Any) -> Any:
    return keras.ops.relu(h)


def build(between: Any, *given: Any, lora: bool = False) -> Any:
    """Return a model whose first layers have weights, and all others zeros."""
    keras.utils.set_random_seed(1)
    model = Gated(between, *given)
    model(X)
    filled(model.up)
    filled(model.down)
    model.down.bias.assign(np.zeros(8))
    if lora:
        model.up.enable_lora(2)
        model.down.enable_lora(2)
    return model


def tried(comm: Any, model: Any, looked_at: str, plan: Any = None) -> Any:
    """Return a divided model that was checked."""
    if looked_at in ("example", "verify"):
        return parallelize(model, comm, plan or PLAN, **{looked_at: X})
    parallelize(model, comm, plan or PLAN)
    (tf.function(model, autograph=False) if looked_at == "a graph" else model)(X)
    return model


def state(model: Any) -> list[Any]:
    return [variable.numpy() for variable in model.variables]


@pytest.mark.parametrize("looked_at", LOOKED_AT)
@pytest.mark.parametrize("shape, learns", [((), True), ((5, 1), False)], ids=["a scalar", "frozen"])
@pytest.mark.ranks(min=2)
def test_errors_hidden_by_zeros_are_refused(comm: Any, shape: tuple[int, ...], learns: bool, looked_at: str) -> None:
    model = build(spectrum, shape)
    model.trainable = learns
    before = state(model)
    with pytest.raises(UsageError, match="differs"):
        tried(comm, model, looked_at)
    if looked_at == "example":
        assert all(np.array_equal(one, other) for one, other in zip(state(model), before, strict=True))


@pytest.mark.parametrize("dtype", ["mixed_bfloat16", "float32", "bfloat16"])
@pytest.mark.ranks(min=2)
def test_errors_hidden_by_zeros_of_any_dtype_are_refused(comm: Any, dtype: str) -> None:
    with pytest.raises(UsageError, match="differs"):
        tried(comm, build(spectrum, (), dtype), "example")
    tried(comm, build(relu, (), dtype), "example")


@pytest.mark.ranks(min=2)
def test_auto_leaves_pairs_behind_zeros_whole(comm: Any) -> None:
    with pytest.raises(UsageError, match="finds no layer"):
        tried(comm, build(spectrum), "example", "auto")


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("looked_at", LOOKED_AT)
def test_valid_models_may_have_zeros(comm: Any, looked_at: str, lora: bool) -> None:
    """Each weight keeps its value, and the model trains like the plain one."""
    plain, model = (build(relu, lora=lora) for _ in range(2))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tried(comm, model, looked_at)
    assert not [str(one.message) for one in caught if "plan" in str(one.message)]
    for got, expected in zip(gather_weights(model), plain.get_weights(), strict=True):
        assert np.array_equal(got, expected)
    losses = []
    for one in (plain, model):
        one.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=False)
        losses.append(one.fit(X, X * 2, epochs=3, verbose=0).history["loss"])
    near(losses[0], losses[1], 1e-6 if lora else 1e-10)


@pytest.mark.ranks(min=2)
def test_lora_of_a_divided_layer(comm: Any) -> None:
    """Its second factor is a part."""
    model = parallelize(build(spectrum), comm, PLAN)
    model.up.enable_lora(2)
    with pytest.raises(UsageError, match="differs"):
        model(X)
    plain, model = build(relu, lora=True), parallelize(build(relu), comm, PLAN)
    model.up.enable_lora(2)
    model.down.enable_lora(2)
    near(model(X), plain(X))
    assert not any(np.any(one.lora_kernel_b.numpy()) for one in (model.up, model.down))


@pytest.mark.ranks(min=2)
def test_user_gradients_use_the_zeros(comm: Any) -> None:
    """The first call may be differentiated or trained: the temporary values must not affect it."""
    plain, model = build(relu), parallelize(build(relu), comm, PLAN)
    results: list[Any] = []
    for one in (plain, model):
        with tf.GradientTape() as tape:
            before = tf.reduce_sum(one.gate + one.after)
            loss = tf.reduce_sum(one(X, training=True) ** 2) + before
        results.append([loss, *tape.gradient(loss, [one.after, one.gate.value])])
    for got, expected in zip(*results, strict=True):
        near(got, expected, 1e-10)


@pytest.mark.parametrize("looked_at", LOOKED_AT)
@pytest.mark.parametrize("fails", [True, False])
def test_zeros_stay_if_other_values_fail(comm: Any, fails: bool, looked_at: str) -> None:
    plain, model = (Turned(fails) for _ in range(2))
    for one in (plain, model):
        one(X)
        filled(one)
        one.turn.assign(0.0)
    model = tried(comm, model, looked_at)
    near(model(X), plain(X))
    assert float(model.turn.numpy()) == 0
