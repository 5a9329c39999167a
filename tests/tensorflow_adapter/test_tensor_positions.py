"""A layer without weights that looks at other positions took `Sequence`, and saw a part of them, in silence."""

from __future__ import annotations

from typing import Any

import keras
import pytest
import tensorflow as tf
from keras import ops

from commlib.errors import UsageError
from commlib.tensor import Column, Plan, Row, Sequence
from commlib_tensorflow.tensor import parallelize
from tests.keras_pipelines import filled
from tests.tensorflow_adapter.tensor_oracle import in_float64, near, values

__all__ = ["in_float64"]

L = keras.layers
PLAN: Plan = {"own": Sequence(1), "up": Column(sequence=1), "down": Row(sequence=1)}
WRONG: dict[str, Any] = {
    "centering": lambda x: x - ops.mean(x, 1, keepdims=True),
    "a norm of all": lambda x: x / ops.sqrt(ops.mean(x**2)),
    "a running sum": lambda x: ops.cumsum(x, 1),
    "its number": lambda x: x + ops.cast(ops.arange(x.shape[1]), x.dtype)[:, None],
}
RIGHT: dict[str, Any] = {
    "features": lambda x: x - ops.mean(x, -1, keepdims=True),
    "elements": lambda x: x * 2,
    "dropout": lambda x: x * keras.random.uniform(ops.shape(x), 1, 1.0000000000001, dtype=x.dtype),
}


class Applied(keras.layers.Layer):  # type: ignore[misc]  # Keras has no types
    def __init__(self, function: Any) -> None:
        super().__init__(name="own")
        self.function = function

    def call(self, x: Any) -> Any:
        return self.function(x)


def made(function: Any, tokens: int) -> Any:
    given = keras.Input((tokens, 8))
    x = Applied(function)(given)
    return filled(keras.Model(given, L.Dense(8, name="down")(L.Dense(12, name="up")(x))))


@pytest.mark.ranks(min=2, max=3)
@pytest.mark.parametrize("name", WRONG)
def test_other_positions(comm: Any, name: str) -> None:
    with pytest.raises(UsageError, match=r"own .*would see a part of"):
        parallelize(made(WRONG[name], 2), comm, PLAN)


@pytest.mark.ranks(max=3)
@pytest.mark.parametrize("name", RIGHT)
def test_each_by_itself(comm: Any, name: str) -> None:
    model, x = parallelize(made(RIGHT[name], 2), comm, PLAN), values(3, 2 * comm.size, 8)
    own, whole = model(tf.split(x, comm.size, 1)[comm.rank]), made(RIGHT[name], 2 * comm.size)(x)
    near(own, tf.split(whole, comm.size, 1)[comm.rank], 1e-10)
