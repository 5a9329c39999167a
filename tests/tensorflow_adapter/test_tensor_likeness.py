"""Models that differ among ranks: `parallelize` silently accepted them if weights had the same shapes."""

from __future__ import annotations

import warnings
from typing import Any

import keras
import numpy as np
import pytest
from keras import ops

from commlib.errors import MismatchError
from commlib.tensor_parallel import Column, Plan, Row
from commlib_tensorflow.tensor import parallelize
from tests.tensorflow_adapter.tensor_oracle import in_float64, values

__all__ = ["in_float64"]

L = keras.layers
PLAN: Plan = {"up": Column(), "down": Row()}


class Scaled(keras.layers.Layer):  # type: ignore[misc]
    def __init__(self, scale: float, act: Any = None, **options: Any) -> None:
        super().__init__()
        self.scale, self.act = scale, act
        self.__dict__.update(options)

    def call(self, x: Any) -> Any:
        return x * self.scale


class OwnDense(keras.layers.Dense):  # type: ignore[misc]
    pass


def build(between: Any = lambda h: h, last: Any = None, **options: Any) -> Any:
    given = keras.Input((6,))
    h = between(L.Dense(8, name="up", **options)(given))
    return keras.Model(given, L.Dense(3, name="down", activation=last)(h))


def either(rank: int, *two: Any) -> Any:
    return two[min(rank, 1)]


DIFFERENT: dict[str, tuple[Any, str]] = {
    "an activation": (lambda r: build(activation=either(r, "tanh", "relu")), "layer 1, up: activation="),
    "an activation of the Row": (lambda r: build(last=either(r, "tanh", "relu")), "layer 2, down: activation="),
    "a layer": (lambda r: build(either(r, L.ReLU(), L.ELU())), "ReLU.*ELU"),
    "an activation between": (lambda r: build(L.Activation(either(r, "tanh", "relu"))), "layer 2, .*: activation="),
    "a function": (
        lambda r: build(either(r, L.Activation(lambda h: h * 2), L.Activation(lambda h: h * 3))),
        "layer 2, .*: activation=",
    ),
    "a slope": (lambda r: build(L.LeakyReLU(either(r, 0.1, 0.3))), "negative_slope=0.1"),
    "a rate": (lambda r: build(L.Dropout(either(r, 0.1, 0.3))), "rate=0.1"),
    "a number in the graph": (lambda r: build(lambda h: h * (r + 1)), "Multiply"),
    "an array in the graph": (lambda r: build(lambda h: h * np.full(8, r + 1.0)), "Multiply"),
    "an operation": (lambda r: build(either(r, ops.tanh, ops.relu)), "Tanh.*Relu"),
    "a dimension": (lambda r: build(lambda h: ops.flip(h, either(r, 0, 1))), "axis=0"),
    "a regularizer": (lambda r: build(kernel_regularizer=either(r, "l1", "l2")), "kernel_regularizer="),
    "its strength": (lambda r: build(kernel_regularizer=keras.regularizers.L2((r + 1) / 10)), "0.1"),
    "a constraint": (lambda r: build(kernel_constraint=either(r, None, "non_neg")), "kernel_constraint="),
    "what is frozen": (lambda r: build(trainable=r == 0), "trainable=True"),
    "of one's own": (lambda r: build(OwnDense(8, either(r, "tanh", "relu"))), "layer 2, .*: activation='tanh'"),
}


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("name", DIFFERENT)
def test_different_models(comm: Any, name: str) -> None:
    make, text = DIFFERENT[name]
    model = make(comm.rank)
    with pytest.raises(MismatchError, match=f"parallelize: .*{text}"):
        parallelize(model, comm, PLAN)
    assert not hasattr(model.get_layer("up"), "style")


@pytest.mark.ranks(min=2)
def test_plans_by_auto_are_compared(comm: Any) -> None:
    """Ranks find different plans for different models, and would compare different values."""
    model = build(either(comm.rank, L.ReLU(), L.Softmax()))
    with pytest.raises(MismatchError, match="parallelize"):
        parallelize(model, comm, "auto", report=lambda table: None)


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("options", [{"scale": True}, {"act": True}], ids=["a number", "a function"])
def test_settings_of_user_layers(comm: Any, options: dict[str, bool]) -> None:
    """They may be intended, which cannot be detected, so rank 0 warns."""
    scale, act = (either(comm.rank * options.get(key, 0), *two) for key, two in
                  (("scale", (1.0, 2.0)), ("act", (ops.tanh, ops.relu))))  # fmt: skip
    model = build(Scaled(scale, act))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        parallelize(model, comm, PLAN)
    messages = [str(one.message) for one in caught if "ranks hold different models" in str(one.message)]
    assert len(messages) == (comm.rank == 0)
    assert all("layer 2, Scaled: " in text and "on rank 0" in text and "on rank 1 of" in text for text in messages)


def test_some_settings_may_differ(comm: Any) -> None:
    """Numbered names, seeds, initializers and rank-dependent settings may differ."""
    for _ in range(comm.rank):
        build(L.Dense(4))

    def between(h: Any) -> Any:
        h = Scaled(1.0, keras.activations.tanh, rank=comm.rank, loud=comm.rank == 0, place=f"gpu:{comm.rank}")(h)
        return L.Activation(lambda x: x * 2)(L.Lambda(lambda x: x + 1)(h))

    start = either(comm.rank, "zeros", keras.initializers.RandomNormal(seed=comm.rank))
    inner = keras.Sequential(
        [keras.Input((3,)), L.Dense(4, "relu"), L.Dropout(0.1, seed=comm.rank), L.Reshape((2, 2)), L.LSTM(3)]
    )
    model = build(between, kernel_initializer=start)
    model = keras.Model(model.input, inner(model.output))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        parallelize(model, comm, PLAN)
    assert not [str(one.message) for one in caught if "different" in str(one.message)]
    assert model(values(2, 6)).shape == (2, 3)
