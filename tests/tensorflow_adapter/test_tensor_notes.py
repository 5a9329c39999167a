"""Marks of divided weights survive copies; without them, parts were taken for whole weights and averaged."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import commlib_tensorflow as ct
from commlib import Mesh
from commlib.errors import UsageError
from commlib.tensor_parallel import Column, Row
from commlib_tensorflow.keras import callbacks
from commlib_tensorflow.tensor import parallelize

PLAN: Any = {"up": Column(), "down": Row()}


def model_on(axis: Any) -> Any:
    keras.utils.set_random_seed(0)
    layers = [keras.Input((6,)), keras.layers.Dense(8, name="up"), keras.layers.Dense(6, name="down")]
    return parallelize(keras.Sequential(layers), axis, PLAN)


def fit(model: Any, optimizer: Any, callbacks: Any = ()) -> None:
    x = np.ones((4, 6), np.float32)
    model.compile(optimizer, "mse")
    model.fit(x, x, verbose=0, callbacks=list(callbacks))


def gradients(model: Any, variables: Any) -> Any:
    with ct.DistributedGradientTape(tf.GradientTape()) as tape:
        loss = tf.reduce_sum(model(np.ones((4, 6), np.float32)) ** 2)
    return tape.gradient(loss, variables)


def distributed(**options: Any) -> Any:
    return ct.DistributedOptimizer(keras.optimizers.SGD(0.1), **options)


CALLS: dict[str, Any] = {
    "fit": lambda model: fit(model, distributed()),
    "apply": lambda model: distributed().apply_gradients([(tf.ones(v.shape), v) for v in model.trainable_variables]),
    "tape": lambda model: gradients(model, model.trainable_variables),
    "tape, TensorFlow's variables": lambda model: gradients(model, [v.value for v in model.trainable_variables]),
    "broadcast": lambda model: ct.broadcast_variables(model.variables, 0),
    "callback": lambda model: fit(model, keras.optimizers.SGD(0.1), [callbacks.BroadcastGlobalVariablesCallback(0)]),
}


@pytest.mark.parametrize("call", CALLS)
def test_different_parts_are_never_averaged(comm: Any, call: str) -> None:
    """Regression: without mesh= different ranks' parts were averaged; broadcast replaced them by rank 0's."""
    model = model_on(comm)
    if comm.size > 1:
        with pytest.raises(UsageError, match=r"but ranks \[\d.*have other shards.*mesh"):
            CALLS[call](model)


def test_equal_parts_are_averaged(comm: Any) -> None:
    mesh = Mesh(dp=-1, tp=2 if comm.size % 2 == 0 else 1)
    fit(model_on(mesh["tp"]), distributed(mesh=mesh))
    mesh.close()


X, Y = np.random.default_rng(1).standard_normal((2, 8, 6)).astype(np.float32)


def make(seed: int = 0) -> Any:
    keras.utils.set_random_seed(seed)
    layers = [keras.layers.LayerNormalization(), keras.layers.Dense(8, name="up"), keras.layers.Dense(6, name="down")]
    return keras.Sequential([keras.Input((6,)), *layers])


def step(model: Any, optimizer: Any, rows: Any = tuple(range(8)), clip: Any = None) -> None:
    """Train for one user-defined step."""
    x, y = X[list(rows)], Y[list(rows)]
    with tf.GradientTape() as recorded:
        loss = tf.reduce_mean((model(x) - y) ** 2)
    gradients = recorded.gradient(loss, model.trainable_variables)
    if clip is not None:
        gradients, _ = clip(gradients, 0.1)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))


def close(model: Any, plain: Any) -> None:
    for got, expected in zip(ct.tensor.gather_weights(model), plain.get_weights(), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("way", ["fit", "own"])
def test_marks_identify_their_mesh(comm: Any, way: str) -> None:
    """Regression: it was an error without mesh=, although marks identify the ranks with the same part."""
    mesh = Mesh(dp=-1, tp=2 if comm.size % 2 == 0 else 1)
    place, replicas = mesh.coordinate("dp"), mesh["dp"].size
    if 4 % replicas:
        pytest.skip("as many rows of 4 on each rank")
    plain, model = make(), parallelize(make(place), mesh["tp"], PLAN)
    ct.broadcast_variables(model.variables, 0)
    close(model, plain)
    rows = np.arange(8).reshape(-1, 2, 4)[:, :, place * 4 // replicas : (place + 1) * 4 // replicas].reshape(-1)
    optimizer = distributed()
    if way == "fit":
        model.compile(optimizer, "mse")
        model.fit(X[rows], Y[rows], batch_size=len(rows), shuffle=False, verbose=0)
    else:
        step(model, optimizer, rows)
    step(plain, keras.optimizers.SGD(0.1))
    close(model, plain)
    mesh.close()


def test_a_mesh_without_replicas_reduces_nothing(comm: Any) -> None:
    mesh = Mesh(tp=-1)
    plain, model = make(), parallelize(make(comm.rank), mesh["tp"], PLAN)
    ct.broadcast_variables(model.variables, comm.size - 1)
    step(model, distributed())
    step(plain, keras.optimizers.SGD(0.1))
    close(model, plain)
    mesh.close()


@pytest.mark.parametrize("traced", [False, True])
def test_diverging_ranks_are_reported(comm: Any, traced: bool) -> None:
    """TensorFlow's own clipping uses the norm of this rank's parts: whole weights differed among ranks."""
    model, optimizer = parallelize(make(), comm, PLAN), keras.optimizers.SGD(0.01)
    calls = [lambda clip=clip: step(model, optimizer, clip=clip) for clip in (None, tf.clip_by_global_norm)]
    train, clipped = (tf.function(call) for call in calls) if traced else calls
    for _ in range(5):
        train()
    if comm.size == 1:
        clipped()
        return
    with pytest.raises(
        Exception, match=r"SGD of Keras.*ranks have different gradients.*layer_norm.*clip_by_global_norm"
    ):
        for _ in range(5):  # before its steps 6, 7, 8, ...
            clipped()


@pytest.mark.parametrize("traced", [False, True])
def test_an_optimizer_in_a_user_loop_is_divided(comm: Any, traced: bool) -> None:
    """Regression: only the optimizer of compile was divided, and any other lost its variables."""
    plain, model = make(), make()
    optimizers = [keras.optimizers.Adam(0.01) for _ in range(2)]
    for one, optimizer in zip((plain, model), optimizers, strict=True):
        step(one, optimizer)
    parallelize(model, comm, PLAN)
    for one, optimizer in zip((plain, model), optimizers, strict=True):
        train = tf.function(step) if traced else step
        for _ in range(2):
            train(one, optimizer)
    close(model, plain)


class Own(keras.Model):  # type: ignore[misc]  # Keras has no types
    """A model that uses all features between two layers if `wrong`."""

    def __init__(self, wrong: bool) -> None:
        super().__init__()
        self.up, self.down, self.wrong = keras.layers.Dense(8, name="up"), keras.layers.Dense(6, name="down"), wrong

    def call(self, x: Any) -> Any:
        return self.encode(x)

    def encode(self, x: Any) -> Any:
        h = self.up(x)
        return self.down(tf.nn.softmax(h) if self.wrong else tf.nn.relu(h))


def test_a_call_that_bypasses_the_model_is_reported(comm: Any) -> None:
    """Regression: it was silently not checked, and a model that was refused once was accepted later."""
    for wrong in (False, True):
        model = Own(wrong)
        model(X)
        parallelize(model, comm, PLAN)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model.encode(tf.constant(X))
            model.encode(tf.constant(X))
        messages = [str(one.message) for one in caught if "not checked" in str(one.message)]
        assert len(messages) == (comm.rank == 0), messages
        assert not messages or "of Own is not checked: up is called before the model itself" in messages[0]
        for _ in range(2):
            if wrong:
                with pytest.raises(UsageError, match="oftmax"):
                    model(X)
            else:
                model(X)


def test_quantisation_of_a_divided_layer_is_refused(comm: Any) -> None:
    """Without Keras' own check, the scales would be those of this rank's part."""
    for layer in model_on(comm).layers:
        with pytest.raises(UsageError, match=r"quantise gather_model\(model\)"):
            layer.quantize("int8", type_check=False)


def test_a_configuration_describes_the_whole(comm: Any) -> None:
    model = model_on(comm)
    for built in (keras.models.clone_model(model), type(model).from_config(model.get_config())):
        assert [tuple(variable.shape) for variable in built.variables] == [(6, 8), (8,), (8, 6), (6,)]
        assert type(built.layers[0]) is keras.layers.Dense
    if comm.size > 1:
        with pytest.raises(UsageError, match="save gather_model"):
            copy.deepcopy(model)
