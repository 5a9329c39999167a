"""LoRA of divided Keras layers, enabled before or after the division, matches one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import pytest

from commlib.errors import MismatchError
from commlib.tensor_parallel import Column, Row, Vocabulary
from commlib_tensorflow._shards import shard_of
from commlib_tensorflow.tensor import gather_model, gather_weights, parallelize
from tests.inputs.keras_pipelines import filled
from tests.tensorflow_adapter.tensor_oracle import in_float64, near, near_shard, run, sequential, values, words

__all__ = ["in_float64"]

L = keras.layers
FLOAT32 = 1e-5
"""Keras keeps both factors, and so their gradients, in float32: some ten roundings of 6e-8, of the largest element."""


def dense() -> Any:
    return sequential(L.Dense(7, "tanh", name="up"), L.Dense(3, name="down"), shape=(5,))


def table() -> Any:
    layers = L.Embedding(9, 6, name="words"), L.Embedding(9, 5, name="features")
    given = keras.Input((4,), dtype="int64")
    return filled(keras.Model(given, L.Concatenate()([layer(given) for layer in layers])))


def einsums() -> Any:
    up = L.EinsumDense("abc,cde->abde", (None, 4, 3), bias_axes="de", name="up")
    out = L.EinsumDense("abde,dec->abc", (None, 5), bias_axes="c", name="down")
    return sequential(up, out, shape=(3, 5))


def convolutions() -> Any:
    return sequential(L.Conv1D(6, 2, name="up"), L.Conv1D(3, 1, name="down"), shape=(5, 2))


PAIR = {"up": Column(), "down": Row()}
KINDS: dict[str, tuple[Callable[[], Any], Any, Any]] = {
    "dense": (dense, PAIR, values(4, 5)),
    "embeddings": (table, {"words": Vocabulary(), "features": Column(gather=True)}, words(9, 2, 4)),
    "einsum": (einsums, PAIR, values(2, 3, 5)),
    "convolutions": (convolutions, PAIR, values(2, 5, 2)),
}


def enable(model: Any, plan: Any, **options: Any) -> Any:
    keras.utils.set_random_seed(3)
    for name in plan:
        model.get_layer(name).enable_lora(2, lora_alpha=3.0, b_initializer="he_uniform", **options)
    return model


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("when", ["before", "after"])
def test_gradients_and_weights_match_one_process(comm: Any, kind: str, when: str) -> None:
    """Regression: the whole factor got a part of its gradient, and the other one was not marked as a part."""
    make, plan, x = KINDS[kind]
    whole = enable(make(), plan)
    own = enable(make(), plan) if when == "before" else make()
    parallelize(own, comm, plan)
    if when == "after":
        enable(own, plan)
    shapes = [tuple(whole(x).shape)]
    results = [run(model, model.trainable_variables, [x], shapes, compiled=when == "after") for model in (own, whole)]
    near(results[0][0][0], results[1][0][0], FLOAT32)
    for variable, got, expected in zip(own.trainable_variables, results[0][2], results[1][2], strict=True):
        near_shard(got, expected, variable, FLOAT32)
    for got, expected in zip(gather_weights(own), whole.get_weights(), strict=True):
        near(got, expected, 0.0)
    near(gather_model(own)(x), whole(x), FLOAT32)
    factors = [variable for variable in own.trainable_variables if "lora" in variable.path]
    assert sum(shard_of(variable) is not None for variable in factors) == len(factors) // 2 == len(plan)


@pytest.mark.ranks(min=2)
def test_ranks_that_enable_different_lora_are_refused(comm: Any) -> None:
    model = parallelize(dense(), comm, PAIR)
    with pytest.raises(MismatchError, match="given LoRA"):
        model.get_layer("up").enable_lora(2 + comm.rank)


class Tuned(keras.layers.Layer):  # type: ignore[misc]
    """A layer and a product of two small ones, as users write LoRA."""

    def __init__(self, features: int, **options: Any) -> None:
        super().__init__(**options)
        self.base, self.a = L.Dense(features, name="base"), L.Dense(2, use_bias=False, name="a")
        self.b = L.Dense(features, use_bias=False, name="b")

    def build(self, shape: Any) -> None:
        self.base.build(shape)
        self.a.build(shape)
        self.b.build((*shape[:-1], 2))

    def call(self, x: Any) -> Any:
        return self.base(x) + self.b(self.a(x))

    def merge(self) -> None:
        self.base.kernel.assign_add(keras.ops.matmul(self.a.kernel, self.b.kernel))
        self.b.kernel.assign(keras.ops.zeros_like(self.b.kernel))


def test_auto_divides_user_defined_lora_as_its_layers(comm: Any) -> None:
    """Regression: factors were divided by LoRA's rank next to whole layers, and merging added partial products."""

    def make() -> Any:
        return sequential(Tuned(8, name="up"), L.ReLU(), Tuned(6, name="down"), shape=(6,))

    own, whole = parallelize(make(), comm, "auto", report=lambda table: None), make()
    up, down = own.get_layer("up"), own.get_layer("down")
    assert [hasattr(one, "style") for one in (up.base, up.a, up.b)] == [True, False, True]
    assert [hasattr(one, "style") for one in (down.base, down.a, down.b)] == [True, True, False]
    near(own(values(4, 6)), whole(values(4, 6)))
    for model in (own, whole):
        for name in ("up", "down"):
            model.get_layer(name).merge()
    for got, expected in zip(gather_weights(own), whole.get_weights(), strict=True):
        near(got, expected)
    near(own(values(4, 6)), whole(values(4, 6)))
