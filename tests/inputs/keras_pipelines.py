"""Keras models for tests of pipelines, in float64, and one process that trains the same model."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

WIDTH = 4

# Sums of microbatches' gradients are added in another order than in one process: some ulps of float64.
EXACT = 1e-12


@pytest.fixture(autouse=True)
def in_float64() -> Iterator[None]:
    """Make Keras compute in float64, losses and metrics included. Its policy is created once, from floatx."""
    before, policy = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    yield
    keras.config.set_floatx(before)
    keras.config.set_dtype_policy(policy)


def filled(model: Any, seed: int = 0) -> Any:
    """Give a model the same weights on every rank."""
    generator = np.random.default_rng(seed)
    model.set_weights([generator.normal(size=weight.shape) * 0.5 for weight in model.get_weights()])
    return model


def layers(count: int, seed: int = 0) -> Any:
    dense = [keras.layers.Dense(WIDTH, activation="tanh", name=f"d{number}") for number in range(count)]
    return filled(keras.Sequential([keras.Input((WIDTH,)), *dense]), seed)


def batch(rows: int, seed: int = 1) -> tuple[Any, Any]:
    generator = np.random.default_rng(seed)
    return generator.normal(size=(rows, WIDTH)), generator.normal(size=(rows, WIDTH))


def key(variable: Any) -> str:
    """Return a variable's name without that of its model."""
    return "/".join(variable.path.split("/")[-2:])


def near(actual: Any, expected: Any, tolerance: float = EXACT) -> None:
    np.testing.assert_allclose(np.asarray(actual), np.asarray(expected), rtol=tolerance, atol=tolerance)


def assert_gradients(pipe: Any, expected: dict[str, Any], tolerance: float = EXACT) -> None:
    for variable, gradient in zip(pipe.trainable_variables, pipe.gradients, strict=True):
        other_gradient = expected[key(variable)]
        assert (gradient is None) == (other_gradient is None), key(variable)
        if gradient is not None:
            near(gradient, tf.convert_to_tensor(other_gradient), tolerance)


def assert_weights(pipe: Any, whole: Any, tolerance: float = EXACT) -> None:
    expected = {key(variable): variable for variable in whole.variables}
    for variable in pipe.variables:
        if "seed_generator" not in variable.path:  # whose names are numbers
            near(variable, expected[key(variable)], tolerance)


class SingleProcess:
    """One process with the whole model. microbatches: it receives parts of a batch, and adds up their contributions."""

    def __init__(self, model: Any, optimizer: Any = None, loss: Any = "mse") -> None:
        self.model, self.gradients = model, dict.fromkeys(map(key, model.trainable_variables))
        model.compile(optimizer=optimizer, loss=loss)

    def step(self, x: Any, y: Any, sample_weight: Any = None, microbatches: int = 1) -> float:
        total, rows = 0.0, len(keras.tree.flatten(y)[0])
        bounds = np.cumsum([0, *(len(part) for part in np.array_split(np.arange(rows), microbatches))])
        for start, end in pairwise(bounds):
            if start == end:
                continue
            part = [
                None if value is None else keras.tree.map_structure(lambda leaf: leaf[start:end], value)  # noqa: B023
                for value in (x, y, sample_weight)
            ]
            part = [None if v is None else keras.tree.map_structure(tf.convert_to_tensor, v) for v in part]
            with tf.GradientTape() as tape:
                output = self.model(part[0], training=True)
                loss = self.model.compute_loss(part[0], part[1], output, part[2]) * (end - start) / rows
            total += float(loss)
            gradients = tape.gradient(loss, self.model.trainable_variables)
            for variable, gradient in zip(self.model.trainable_variables, gradients, strict=True):
                if gradient is not None:
                    before = self.gradients[key(variable)]
                    gradient = tf.convert_to_tensor(gradient)
                    self.gradients[key(variable)] = gradient if before is None else before + gradient
        return total

    def update(self) -> None:
        self.model.optimizer.apply(list(self.gradients.values()), self.model.trainable_variables)
        self.gradients = dict.fromkeys(self.gradients)
