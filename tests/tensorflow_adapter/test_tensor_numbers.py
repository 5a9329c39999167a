"""Numbers of heads stored in Keras layers: they are divided with the weights, and whole in configurations."""

from __future__ import annotations

import math
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

from commlib import UsageError
from commlib.tensor_parallel import Column, PerRank, Row
from commlib_tensorflow.tensor import gather_model, parallelize
from tests.inputs.keras_pipelines import filled
from tests.tensorflow_adapter.tensor_oracle import alone, in_float64, near, near_shard, run, same, values

__all__ = ["in_float64"]

L = keras.layers
WIDTH, HEADS, TOKENS = 24, 4, 6


@keras.saving.register_keras_serializable("numbers")
class Attention(keras.layers.Layer):  # type: ignore[misc]
    """Attention as users write it, with numbers of heads and features. way: how they are used."""

    def __init__(self, heads: int = HEADS, size: int = WIDTH // HEADS, way: str = "rows", **options: Any) -> None:
        super().__init__(**options)
        self.heads, self.size, self.way, self.split = heads, size, way, (heads, size)
        self.inner = {name: L.Dense(heads * size, use_bias=name != "k", name=name) for name in "qkvo"}

    def build(self, shape: Any) -> None:
        for layer in self.inner.values():
            layer.build(shape)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "heads": self.heads, "size": self.size, "way": self.way}

    def of_heads(self, x: Any, rows: Any, tokens: Any) -> Any:
        if self.way == "tensorflow":
            return tf.reshape(x, (tf.shape(x)[0], tokens, self.heads, self.size))
        if self.way == "tuple":
            return ops.reshape(x, (rows, tokens, *self.split))
        return ops.reshape(x, (rows if self.way == "rows" else -1, tokens, self.heads, self.size))

    def call(self, x: Any) -> Any:
        rows, tokens = ops.shape(x)[:2]
        q, k, v = (self.of_heads(self.inner[name](x), rows, tokens) for name in "qkv")
        weights = ops.softmax(ops.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(6))
        mixed = ops.einsum("bhqk,bkhd->bqhd", weights, v)
        together = -1 if self.way == "tuple" else self.heads * self.size
        return self.inner["o"](ops.reshape(mixed, (rows, tokens, together)))


def layered(x: Any) -> Any:
    """The same attention, made of layers that reshape."""
    shape = (TOKENS, HEADS, WIDTH // HEADS)
    q, k, v = (L.Reshape(shape)(L.Dense(WIDTH, use_bias=name != "k", name=f"{name}1")(x)) for name in "qkv")
    weights = L.Softmax()(ops.einsum("bqhd,bkhd->bhqk", q, k))
    return L.Dense(WIDTH, name="o1")(L.Reshape((TOKENS, WIDTH))(ops.einsum("bhqk,bkhd->bqhd", weights, v)))


def model(*ways: str) -> Any:
    x = given = keras.Input((TOKENS, WIDTH))
    for way in ways:
        x = x + (layered(x) if way == "layers" else Attention(way=way, name=way)(x))
    return filled(keras.Model(given, x))


@pytest.mark.ranks(min=2, max=2)
@pytest.mark.parametrize(
    "ways", [("rows", "layers"), pytest.param(("any", "tensorflow", "tuple"), marks=pytest.mark.long)]
)
def test_auto_divides_heads_that_are_numbers(comm: Any, ways: tuple[str, ...]) -> None:
    """Regression: reshapes to a fixed number of heads left all of attention whole."""
    whole, own = model(*ways), model(*ways)
    configuration = own.get_config()
    parallelize(own, comm, "auto", report=lambda table: None)
    sizes = [sum(np.prod(v.shape) for v in each.trainable_variables) for each in (own, whole)]
    assert sizes[0] <= 0.55 * sizes[1]
    x = [values(2, TOKENS, WIDTH)]
    expected = alone(comm, lambda: run(whole, whole.trainable_variables, x, [(2, TOKENS, WIDTH)], True))
    got = run(own, own.trainable_variables, x, [(2, TOKENS, WIDTH)], False)
    near(got[0][0], expected[0][0], 1e-10)
    for variable, one, other in zip(own.trainable_variables, got[2], expected[2], strict=True):
        near_shard(one, other, variable, 1e-10)
    assert own.get_config() == configuration  # of the whole, so that a whole layer can be created from it
    near(gather_model(own)(x[0]), expected[0][0], 1e-10)
    assert tuple(own(keras.Input((TOKENS, WIDTH))).shape) == (None, TOKENS, WIDTH)


@pytest.mark.ranks(min=2, max=2)
def test_numbers_in_a_user_plan(comm: Any) -> None:
    """Regression: it was refused because of a number in the model, which a rank can adapt now."""
    layers = {**{f"rows/{name}": Column(units=HEADS) for name in "qkv"}, "rows/o": Row(units=HEADS)}
    with pytest.raises(UsageError, match=r"such as heads, give the constant PerRank\(\) in the plan"):
        parallelize(model("rows"), comm, layers)
    with pytest.raises(UsageError, match=r"rows\.heads is 4, which 2 ranks cannot split in 3 units"):
        parallelize(model("rows"), comm, {**layers, "rows.heads": PerRank(3)})
    same(lambda: model("rows"), {**layers, "*.heads": PerRank(HEADS)}, comm, values(2, TOKENS, WIDTH))


class Alone(keras.Model):  # type: ignore[misc]
    """A model that stores the number itself."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = HEADS
        self.up, self.down = L.Dense(WIDTH, name="up"), L.Dense(WIDTH, name="down")

    def call(self, x: Any) -> Any:
        x = ops.softmax(ops.reshape(self.up(x), (-1, TOKENS, self.heads, WIDTH // HEADS)))
        return self.down(ops.reshape(x, (-1, TOKENS, self.heads * (WIDTH // HEADS))))


@pytest.mark.ranks(min=2, max=2)
def test_a_number_of_the_model_itself(comm: Any) -> None:
    def make() -> Any:
        built = Alone()
        built(values(2, TOKENS, WIDTH))
        return filled(built)

    own = same(make, {"up": Column(), "down": Row(), "heads": PerRank()}, comm, values(2, TOKENS, WIDTH))
    assert own.heads == HEADS // 2
