"""Looking at a Keras model has no side effects: lists had an entry more after the first call, draws were others."""

from __future__ import annotations

import random
import warnings
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from commlib.tensor import Column, Row
from commlib_tensorflow.tensor import parallelize, verify

PLAN: Any = {"up": Column(), "down": Row()}


class Hostile(keras.Model):  # type: ignore[misc]  # Keras has no types
    """Keeps whatever a model can keep."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = keras.layers.Dense(12, "relu", name="up"), keras.layers.Dense(8, name="down")
        self.norm, self.drop = keras.layers.BatchNormalization(), keras.layers.Dropout(0.5, seed=3)
        self.calls, self.log, self.seen = 0, [0], {"calls": [0]}
        self.draws, self.number = np.random.default_rng(3), tf.Variable(0, trainable=False)

    def call(self, x: Any, training: Any = None) -> Any:
        self.calls += 1
        self.log.append(self.calls)
        self.seen["calls"].append(self.calls)
        self.seen[f"call {self.calls}"] = [1]
        self.draws.random()
        np.random.rand()
        random.random()
        self.number.assign_add(1)
        return self.drop(self.down(self.up(self.norm(x, training=training))), training=training)


def kept(model: Any) -> dict[str, Any]:
    return {
        "calls": (model.calls, list(model.log), {name: list(each) for name, each in model.seen.items()}),
        "number": int(model.number),
        "random": (random.random(), np.random.rand(), float(tf.random.uniform(())), model.draws.random()),
        "seeds": [v.numpy().tolist() for v in model.non_trainable_variables],
        "losses": len(model.losses),
    }


def run(comm: Any, look: str, divide: bool) -> dict[str, Any]:
    keras.utils.set_random_seed(0)
    model, plain, x = Hostile(), Hostile(), np.ones((4, 8), np.float32)
    model(x)
    plain(x)
    plain.set_weights(model.get_weights())
    keras.utils.set_random_seed(1)
    calls = look in ("first call", "function")
    if divide:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            options: Any = {} if calls else {look: x}
            parallelize(model, comm, PLAN, **options)
            if look == "function":
                verify(model, plain, comm, x)
    if calls:
        model(x)
    return kept(model)


@pytest.mark.parametrize("look", ["example", "verify", "first call", "function"])
def test_a_look_is_not_noticed(comm: Any, look: str) -> None:
    """As if nobody had looked, or as after one call."""
    expected, got = run(comm, look, divide=False), run(comm, look, divide=True)
    for what, value in expected.items():
        assert got[what] == value, what
