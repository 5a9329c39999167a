"""Recomputation of single layers of a Keras pipeline, named by patterns or chosen by a function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from commlib.errors import MismatchError, PeerError, UsageError
from commlib_tensorflow import pipeline
from tests.inputs.keras_pipelines import (
    WIDTH,
    SingleProcess,
    assert_gradients,
    assert_weights,
    batch,
    filled,
    in_float64,
    near,
)

__all__ = ["in_float64"]  # a fixture


@keras.saving.register_keras_serializable("recompute_layers")
class Block(keras.layers.Layer):  # type: ignore[misc]  # Keras has no types
    """Draws random numbers and has statistics, in layers that get the training flag from Keras; adds a loss."""

    def __init__(self, number: int) -> None:
        super().__init__(name=f"block{number}")
        self.up = keras.layers.Dense(8, activation="gelu", activity_regularizer="l2", name=f"up{number}")
        self.drop = keras.layers.Dropout(0.5, seed=number, name=f"drop{number}")
        self.norm = keras.layers.BatchNormalization(name=f"norm{number}")
        self.down = keras.layers.Dense(WIDTH, name=f"down{number}")

    def call(self, x: Any) -> Any:
        y = self.norm(self.drop(self.up(x)))
        self.add_loss(0.1 * keras.ops.mean(y**2))
        return {"sum": x + self.down(y), "more": [keras.ops.tanh(y[:, :WIDTH])]}


def blocks(count: int) -> Any:
    x = inputs = keras.Input((WIDTH,))
    for number in range(count):
        built = Block(number)(x)
        x = keras.layers.Activation("tanh", name=f"tanh{number}")(built["sum"]) * built["more"][0]
    model = filled(keras.Model(inputs, keras.layers.Dense(WIDTH, name="head")(x)))
    for variable in model.non_trainable_variables:
        if variable.path.endswith("moving_variance"):
            variable.assign(np.ones(variable.shape))
    return model


HOWS: dict[str, Any] = {
    "blocks": {"block[02468]": "full", "block1": "selective"},
    "within": {"*.up*": "full", "*.down*": "selective", "*.norm*": "full", "*.drop*": "selective", "block1": "full"},
    "all": {"*": "full"},
    "function": lambda name, layer: "selective" if isinstance(layer, Block) else "none",
}


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb_h1"])
def test_single_layers(comm: Any, schedule: Any, how: str, eager: bool) -> None:
    """Regression: only whole stages could be recomputed."""
    count = comm.size * (2 if schedule == "interleaved" else 1)
    alone = SingleProcess(blocks(max(count, 2)), keras.optimizers.SGD(0.1))
    pipe = pipeline(blocks(max(count, 2)), comm, schedule=schedule, microbatches=2, checkpoint=HOWS[how])
    pipe.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=eager)
    for step in range(2):
        x, y = batch(8, step)
        near(pipe.step(x, y), alone.step(x, y, microbatches=2), 1e-10)
        assert_gradients(pipe, alone.gradients, 1e-10)
        assert_weights(pipe, alone.model, 1e-10)
        pipe.apply_gradients()
        alone.update()
    assert all("call" not in vars(layer) for part in pipe.parts for layer in part.calls)
    pipe.close()


class Counts(keras.layers.Layer):  # type: ignore[misc]  # Keras has no types
    """Counts its computations, which only TensorFlow's graph knows."""

    def __init__(self, name: str, seen: Callable[[str], None]) -> None:
        super().__init__(name=name)
        self._seen = seen

    def call(self, x: Any) -> Any:
        def count(value: Any) -> Any:
            self._seen(self.name)
            return value

        return x * tf.ensure_shape(tf.numpy_function(count, [x], x.dtype), x.shape)


@pytest.mark.parametrize("eager", [False, True])
def test_only_named_layers_are_recomputed(comm: Any, eager: bool) -> None:
    """Layers with other names are computed once, and evaluate recomputes nothing."""
    counts: dict[str, int] = {}

    def seen(name: str) -> None:
        counts[name] = counts.get(name, 0) + 1

    created = [Counts(f"{name}{n}", seen) for n in range(comm.size) for name in ("one", "other")]
    dense = [keras.layers.Dense(WIDTH) for _ in created]
    own = [layer for pair in zip(dense, created, strict=True) for layer in pair]
    pipe = pipeline(
        filled(keras.Sequential([keras.Input((WIDTH,)), *own])), comm, microbatches=2, weigh="rows",
        split=[4] * comm.size, checkpoint={"one*": "full"},
    )  # fmt: skip
    pipe.compile("sgd", "mse", run_eagerly=eager)
    x, y = batch(4)
    pipe.test_on_batch(x, y)
    assert counts == {f"one{comm.rank}": 2, f"other{comm.rank}": 2}
    counts.clear()
    pipe.step(x, y)
    assert counts == {f"one{comm.rank}": 4, f"other{comm.rank}": 2}
    pipe.close()


def texts() -> Any:
    """A model with masks, rows of an embedding, and loops."""
    gru = keras.layers.GRU(WIDTH, return_sequences=True, dropout=0.3, seed=3, name="gru")
    return filled(
        keras.Sequential(
            [
                keras.Input((5,), dtype="int32"),
                keras.layers.Embedding(9, WIDTH, mask_zero=True, name="embed"),
                gru,
                keras.layers.LayerNormalization(name="norm"),
                keras.layers.LSTM(WIDTH, name="lstm"),
                keras.layers.Dense(WIDTH, name="head"),
            ]
        )
    )


@pytest.mark.parametrize("policy", ["float64", "mixed_bfloat16"])
def test_masks_loops_and_short_floats(comm: Any, policy: str) -> None:
    """Keras' call context is available again when a layer is recomputed."""
    keras.config.set_dtype_policy(policy)
    generator = np.random.default_rng(0)
    x: Any = generator.integers(0, 9, (6, 5))
    y = generator.normal(size=(6, WIDTH))
    x[:, 0] = 1
    whole: Any = {"*": "full", "norm": "selective", "gru": "selective"}
    alone, pipe = SingleProcess(texts()), pipeline(texts(), comm, microbatches=2, loss="mse", checkpoint=whole)
    tolerance = 1e-10 if policy == "float64" else 0.05
    near(pipe.step(x, y), alone.step(x, y, microbatches=2), tolerance)
    assert_gradients(pipe, alone.gradients, tolerance)
    pipe.close()


class Captures(keras.layers.Layer):  # type: ignore[misc]  # Keras has no types
    """Uses a value that another layer has stored in it."""

    seen: Any = None

    def call(self, x: Any) -> Any:
        return x if self.seen is None else x + self.seen


class Leaves(keras.layers.Layer):  # type: ignore[misc]  # Keras has no types
    def __init__(self, other: Captures) -> None:
        super().__init__()
        self._others = (other,)

    def call(self, x: Any) -> Any:
        if not isinstance(x, keras.KerasTensor):
            other: Any = self._others[0]
            vars(other)["seen"] = x * 2.0
        return x * 1.0


@pytest.mark.parametrize("eager", [False, True])
def test_a_captured_value_has_no_gradient(comm: Any, eager: bool) -> None:
    captures = [Captures(name=f"captures{n}") for n in range(comm.size)]
    own = [layer for one in captures for layer in (keras.layers.Dense(WIDTH), Leaves(one), one)]
    options: dict[str, Any] = {"split": [3] * comm.size, "weigh": "rows", "checkpoint": {"captures*": "full"}}
    pipe = pipeline([keras.Input((WIDTH,)), *own], comm, microbatches=2, **options)
    pipe.compile("sgd", "mse", run_eagerly=eager)
    text = "layer 'captures0' uses .* not an argument"
    with pytest.raises((UsageError, PeerError), match=text if comm.rank == 0 else None):
        pipe.step(*batch(4))
    pipe.close()


class Random(keras.layers.Layer):  # type: ignore[misc]  # Keras has no types
    def call(self, x: Any) -> Any:
        return x + tf.random.normal(tf.shape(x), dtype=x.dtype)


def test_invalid_arguments_are_refused(comm: Any) -> None:
    def model() -> Any:
        own = [layer for n in range(comm.size) for layer in (keras.layers.Dense(WIDTH, name=f"d{n}"), Random())]
        return keras.Sequential([keras.Input((WIDTH,)), *own])

    with pytest.raises(UsageError, match=r"no layer matches 'dense\*'; the layers are d0"):
        pipeline(model(), comm, microbatches=2, checkpoint={"dense*": "full"})
    with pytest.raises(UsageError, match="checkpoint of d0 is 'some', expected one of none, selective, full"):
        pipeline(model(), comm, microbatches=2, checkpoint={"d0": "some"})  # type: ignore[dict-item]
    if comm.size > 1:
        with pytest.raises(MismatchError, match="checkpoint"):
            pipeline(model(), comm, microbatches=2, checkpoint={"d0": "full" if comm.rank else "selective"})
    pipe = pipeline(model(), comm, microbatches=2, loss="mse", weigh="rows", checkpoint={"d*": "full"})
    pipe.step(*batch(4))  # what draws numbers of its own is not computed again
    pipe.close()
    pipe = pipeline(model(), comm, microbatches=2, loss="mse", weigh="rows", checkpoint={"random*": "full"})
    text = "layer 'random.*' uses TensorFlow's RandomStandardNormal"
    with pytest.raises((UsageError, PeerError), match=text if comm.rank == 0 else None):
        pipe.step(*batch(4))
    pipe.close()
