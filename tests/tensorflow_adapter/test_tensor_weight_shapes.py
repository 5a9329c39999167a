"""Shapes of divided weights used as numbers in a model: results were silently wrong.

The oracle is one process: another model with the same weights.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import keras
import pytest
import tensorflow as tf
from keras import ops

from commlib.errors import UsageError
from commlib.tensor_parallel import Column, Plan, Row
from commlib_tensorflow.tensor import parallelize
from tests.inputs.keras_pipelines import filled
from tests.tensorflow_adapter.tensor_oracle import in_float64, near, values

__all__ = ["in_float64"]

PLAN: Plan = {"up": Column(), "down": Row()}
LINE = r"(the shape of its weight).*test_tensor_weight_shapes\.py:\d+.*read units or out_features of the layer"

WRONG: dict[str, Any] = {
    "shape": lambda model, h: h / model.up.kernel.shape[-1],
    "a value": lambda model, h: h / math.sqrt(model.down.kernel.value.shape[0]),
    "ops.shape": lambda model, h: h / ops.shape(model.down.kernel)[0],
    "tf.size": lambda model, h: h / tf.cast(tf.size(model.down.kernel), h.dtype),
    "a tensor": lambda model, h: h / tf.convert_to_tensor(model.up.kernel).shape[-1],
    "tf.shape of a tensor": lambda model, h: h / tf.cast(tf.shape(tf.convert_to_tensor(model.up.kernel))[1], h.dtype),
    "a bias": lambda model, h: h + model.up.bias.shape[0],
    "count_params": lambda model, h: h + model.up.count_params() / 100,
    "all of them": lambda model, h: h + sum(math.prod(one.shape) for one in model.trainable_variables) / 100,
}
RIGHT: dict[str, Any] = {
    "reshapes": lambda model, h: ops.reshape(ops.reshape(h, (-1, model.up.kernel.shape[-1])), (4, 6, -1)),
    "reshapes by a tensor": lambda model, h: ops.reshape(h, (4, 6, tf.convert_to_tensor(model.up.kernel).shape[-1])),
    "units": lambda model, h: h / model.up.units,
    "what is whole": lambda model, h: h / (model.down.bias.shape[0] + model.down.kernel.shape[1]),
}


class Asking(keras.Model):  # type: ignore[misc]  # Keras has no types
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.up, self.down = keras.layers.Dense(12, name="up"), keras.layers.Dense(8, name="down")
        self.function = function

    def call(self, x: Any) -> Any:
        return self.down(self.function(self, self.up(x)))


def build(function: Any) -> Any:
    model = Asking(lambda _, h: h)
    model(rows())
    model.function = function
    return filled(model)


def rows() -> Any:
    return tf.constant(values(4, 6, 8))


@pytest.mark.ranks(min=2, max=3)
@pytest.mark.parametrize("name", WRONG)
def test_a_number_is_refused(comm: Any, name: str) -> None:
    """With example= it is refused before anything is divided, else at the first call, or by the results of verify=."""
    with pytest.raises(UsageError, match=LINE):
        parallelize(build(WRONG[name]), comm, PLAN, example=rows())
    divided = parallelize(build(WRONG[name]), comm, PLAN)
    for _ in range(2):
        with pytest.raises(UsageError, match=LINE):
            divided(rows())
    with pytest.raises(UsageError, match="differs"):
        parallelize(build(WRONG[name]), comm, PLAN, verify=rows())
    with pytest.raises(UsageError, match="finds no layer"):
        parallelize(build(WRONG[name]), comm, "auto", example=rows(), report=lambda table: None)


@pytest.mark.ranks(max=3)
@pytest.mark.parametrize("name", RIGHT)
def test_valid_uses_are_accepted(comm: Any, name: str) -> None:
    for options in ({}, {"example": rows()}, {"verify": rows()}):
        model, plain = build(RIGHT[name]), build(RIGHT[name])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            parallelize(model, comm, PLAN, **options)
            near(model(rows()), plain(rows()))
        assert not [str(one.message) for one in caught if "plan" in str(one.message)]


@pytest.mark.ranks(min=2, max=3)
def test_an_input_that_is_a_part(comm: Any) -> None:
    """The input is already a part: a number that belongs to the whole reveals the error."""
    model = parallelize(build(WRONG["shape"]), comm, {"up": Column(sequence=1), "down": Row(sequence=1)})
    part = tf.split(rows(), comm.size, 1)[comm.rank]
    with pytest.raises(UsageError, match=r"differs from the unsharded model's.*the shape of its weight"):
        model(part)
