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


@pytest.mark.ranks(min=2, max=2)
@pytest.mark.parametrize("wrong", [True, False])
def test_several_inputs(comm: Any, wrong: bool) -> None:
    """A weight for each position beside features: nothing was tried unless all had one shape and were floats."""
    shares = L.Lambda(lambda given: given[0] * given[1] / ops.sum(given[1], 1, keepdims=True), name="own")
    places = L.Lambda(lambda given: given[0] * given[1], name="own")
    x, weights = keras.Input((2, 8)), keras.Input((2, 1))
    model = keras.Model([x, weights], L.Dense(8, name="up")((shares if wrong else places)([x, weights])))
    plan: Plan = {"own": Sequence(1), "up": Column(sequence=1, gather=True)}
    if not wrong:
        parallelize(filled(model), comm, plan)
        return
    with pytest.raises(UsageError, match=r"own .*would see a part of"):
        parallelize(filled(model), comm, plan)


@pytest.mark.ranks(min=2, max=3)
def test_layers_of_keras_are_tried_too(comm: Any) -> None:
    """Scaling looked at several positions, it was said."""
    x = keras.Input((2, 8))
    for axis, is_right in ((-1, True), (1, False)):
        own = L.UnitNormalization(axis, name="own")(L.Rescaling(2.0, name="scale")(x))
        model = filled(keras.Model(x, L.Dense(8, name="down")(L.Dense(12, name="up")(own))))
        plan = {"scale": Sequence(1), **PLAN}
        if is_right:
            parallelize(model, comm, plan)
            continue
        with pytest.raises(UsageError, match=r"own .*would see a part of"):
            parallelize(model, comm, plan)


@pytest.mark.ranks(max=3)
@pytest.mark.parametrize("name", RIGHT)
def test_each_by_itself(comm: Any, name: str) -> None:
    model, x = parallelize(made(RIGHT[name], 2), comm, PLAN), values(3, 2 * comm.size, 8)
    own, whole = model(tf.split(x, comm.size, 1)[comm.rank]), made(RIGHT[name], 2 * comm.size)(x)
    near(own, tf.split(whole, comm.size, 1)[comm.rank], 1e-10)
