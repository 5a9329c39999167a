"""Shared heads: fewer heads of keys and values than ranks train as in one process."""

from __future__ import annotations

from typing import Any

import keras
import pytest
from keras import ops

from commlib import UsageError
from commlib.tensor_parallel import Column, Row
from commlib_tensorflow.tensor import gather_model, gather_weights, parallelize, set_weights
from tests.inputs.keras_pipelines import filled
from tests.tensorflow_adapter.tensor_oracle import alone, in_float64, near, same, values

__all__ = ["in_float64"]

L = keras.layers
WIDTH, HEADS, TOKENS, SIZE = 6, 12, 5, 3
FLOAT32 = 1e-5
"""Keras keeps factors of LoRA in float32."""


def grouped(keys: int, heads: int = HEADS, **options: Any) -> Any:
    x = keras.Input((TOKENS, WIDTH))
    return filled(keras.Model(x, L.GroupQueryAttention(SIZE, heads, keys, name="a", **options)(x, x)))


@keras.saving.register_keras_serializable("heads")
class Attention(keras.layers.Layer):  # type: ignore[misc]
    """Attention as users write it. way: how queries, keys and values are computed."""

    def __init__(self, keys: int = 1, way: str = "dense", regularizer: Any = None, **options: Any) -> None:
        super().__init__(**options)
        self.keys, self.way, self.regularizer = keys, way, regularizer
        plain = {"kernel_regularizer": regularizer, "bias_regularizer": regularizer}
        if way == "fused":
            self.qkv = L.Dense((HEADS + 2 * keys) * SIZE, name="qkv", **plain)
        elif way == "einsum":
            self.q, self.k, self.v = (
                L.EinsumDense("bta,ahd->bthd", (TOKENS, count, SIZE), bias_axes=axes, name=name, **plain)
                for name, count, axes in (("q", HEADS, "hd"), ("k", keys, "hd"), ("v", keys, "d"))
            )
        else:
            self.q, self.k, self.v = (
                L.Dense(count * SIZE, use_bias=name != "v", name=name, **plain)
                for name, count in (("q", HEADS), ("k", keys), ("v", keys))
            )
        self.o = L.Dense(WIDTH, name="o")

    def build(self, shape: Any) -> None:
        for layer in (self.qkv,) if self.way == "fused" else (self.q, self.k, self.v):
            layer.build(shape)
        self.o.build((*shape[:-1], HEADS * SIZE))

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "keys": self.keys, "way": self.way, "regularizer": self.regularizer}

    def compute_output_shape(self, shape: Any) -> Any:
        return shape

    def call(self, x: Any) -> Any:
        rows = ops.shape(x)[0]
        if self.way == "fused":  # one head of keys, and of values
            heads = ops.reshape(self.qkv(x), (rows, TOKENS, -1, SIZE))
            q, k, v = heads[:, :, :-2], heads[:, :, -2:-1], heads[:, :, -1:]
        else:
            q, k, v = (ops.reshape(layer(x), (rows, TOKENS, -1, SIZE)) for layer in (self.q, self.k, self.v))
        k, v = (ops.repeat(one, q.shape[2] // one.shape[2], axis=2) for one in (k, v))
        weights = ops.softmax(ops.einsum("bqhd,bkhd->bhqk", q, k))
        mixed = ops.einsum("bhqk,bkhd->bqhd", weights, v)
        return self.o(ops.reshape(mixed, (rows, TOKENS, -1)))


def own(keys: int, way: str, regularizer: Any = None) -> Any:
    x = keras.Input((TOKENS, WIDTH))
    return filled(keras.Model(x, Attention(keys, way, regularizer, name="a")(x)))


def plan(keys: int, way: str) -> Any:
    if way == "fused":
        parts = (HEADS * SIZE, SIZE, SIZE)
        return {"a/qkv": Column(parts=parts, units=(HEADS, 1, 1)), "a/o": Row(units=HEADS)}
    of_keys = Column(units=keys)
    return {"a/q": Column(units=HEADS), "a/k": of_keys, "a/v": of_keys, "a/o": Row(units=HEADS)}


def train(model: Any, eager: bool = True, **options: Any) -> Any:
    """Return losses of some steps, and the trained weights."""
    model.compile(keras.optimizers.Adam(1e-2, **options), "mse", run_eagerly=eager)
    x, y = values(4, TOKENS, WIDTH), values(4, TOKENS, WIDTH, seed=1)
    return model.fit(x, y, batch_size=2, epochs=2, shuffle=False, verbose=0).history["loss"]


def trained_alike(comm: Any, make: Any, styles: Any, eager: bool = True, **options: Any) -> Any:
    """Compare losses, weights and optimizer state after some steps of a divided model with one process."""

    def reference() -> Any:
        whole = make()
        losses = train(whole, eager, **options)
        return losses, whole.get_weights(), [one.numpy() for one in whole.optimizer.variables]

    losses, weights, state = alone(comm, reference)
    model = parallelize(make(), comm, styles, report=lambda table: None)
    near(train(model, eager, **options), losses, 1e-10)
    for got, expected in zip(gather_weights(model), weights, strict=True):
        near(got, expected, 1e-10)
    whole = gather_model(model)
    for got, expected in zip(whole.optimizer.variables, state, strict=True):
        near(got, expected, 1e-10)
    set_weights(model, whole.get_weights())
    for got, expected in zip(gather_weights(model), whole.get_weights(), strict=True):
        near(got, expected, 0)
    return model


CLIPS: list[dict[str, Any]] = [{}, {"clipnorm": 0.05}, {"global_clipnorm": 0.05}]


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("few", [1, 2])
@pytest.mark.parametrize("clip", CLIPS, ids=["plain", "each", "global"])
def test_grouped_attention(comm: Any, clip: Any, few: int) -> None:
    """Regression: it was refused. Ranks that share a head sum its gradients; norms and state count it once."""
    if comm.size % few:
        pytest.skip("heads of keys that do not divide the ranks")
    model = trained_alike(comm, lambda: grouped(few, use_gate=few > 1), {"a": Column()}, eager=bool(clip), **clip)
    attention = model.get_layer("a")
    shapes = {weight.path.split("/")[-2]: tuple(weight.shape) for weight in attention.weights if len(weight.shape) == 3}
    assert shapes["key"] == (WIDTH, 1, SIZE)
    assert attention.get_config()["num_key_value_heads"] == few


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("way", ["dense", "einsum", "fused"])
@pytest.mark.parametrize("clip", CLIPS, ids=["plain", "each", "global"])
def test_user_defined_attention(comm: Any, clip: Any, way: str) -> None:
    keys = 1 if way == "fused" or comm.size % 2 else comm.size // 2
    trained_alike(comm, lambda: own(keys, way), plan(keys, way), **clip)


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("way", ["dense", "einsum"])
def test_auto_detects_shared_heads(comm: Any, way: str) -> None:
    keys = 1 if comm.size % 2 else comm.size // 2
    trained_alike(comm, lambda: own(keys, way), "auto")
    trained_alike(comm, lambda: grouped(keys), "auto")


class Repeated(keras.layers.Layer):  # type: ignore[misc]
    """Repeats heads of keys by fixed numbers, or selects one. fixed: other heads have fixed numbers, too."""

    def __init__(self, keys: int, way: str, fixed: bool) -> None:
        super().__init__(name="a")
        self.heads, self.keys, self.groups, self.way = HEADS, keys, HEADS // keys, way
        self.shown = (HEADS, keys) if fixed else (-1, -1)
        self.q, self.k, self.v = (L.Dense(n * SIZE, name=name) for name, n in (("q", HEADS), ("k", keys), ("v", keys)))
        self.o = L.Dense(WIDTH, name="o")

    def build(self, shape: Any) -> None:
        for layer in (self.q, self.k, self.v):
            layer.build(shape)
        self.o.build((*shape[:-1], HEADS * SIZE))

    def compute_output_shape(self, shape: Any) -> Any:
        return shape

    def repeated(self, x: Any, rows: Any) -> Any:
        if self.way == "pick":
            return x[:, :, 0]
        if self.way == "tile":
            return ops.tile(x, (1, 1, self.heads, 1))
        if self.way == "repeat":
            return ops.repeat(x, self.groups, axis=2)
        many = ops.tile(x[:, :, :, None], (1, 1, 1, self.groups, 1))
        return ops.reshape(many, (rows, TOKENS, -1, SIZE))

    def call(self, x: Any) -> Any:
        rows, (heads, keys) = ops.shape(x)[0], self.shown
        q = ops.reshape(self.q(x), (rows, TOKENS, heads, SIZE))
        k, v = (self.repeated(ops.reshape(layer(x), (rows, TOKENS, keys, SIZE)), rows) for layer in (self.k, self.v))
        picked = "h" * (len(k.shape) == 4)
        weights = ops.softmax(ops.einsum(f"bqhd,bk{picked}d->bhqk", q, k))
        mixed = ops.einsum(f"bhqk,bk{picked}d->bqhd", weights, v)
        return self.o(ops.reshape(mixed, (rows, TOKENS, -1)))


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize(("way", "few"), [("pick", True), ("tile", True), ("repeat", False), ("expand", False)])
def test_auto_detects_how_heads_are_repeated(comm: Any, way: str, few: bool, fixed: bool) -> None:
    """Regression: pairs stayed whole if a head was selected, tiled or repeated by a number of the layer."""
    keys = 1 if few or comm.size % 2 else comm.size // 2

    def make() -> Any:
        x = keras.Input((TOKENS, WIDTH))
        return filled(keras.Model(x, Repeated(keys, way, fixed)(x)))

    own = same(make, "auto", comm, values(2, TOKENS, WIDTH))
    assert own.get_layer("a").q.kernel.shape[1] == HEADS * SIZE // comm.size


@pytest.mark.ranks(min=2)
def test_tiled_heads_have_another_order(comm: Any) -> None:
    """Tiled heads alternate, so that a rank's are not adjacent."""
    x = keras.Input((TOKENS, WIDTH))
    layer = Repeated(2, "tile", False)
    layer.heads = layer.groups
    model = filled(keras.Model(x, layer(x)))
    with pytest.raises(UsageError, match="finds no layer to shard"):
        parallelize(model, comm, "auto", report=lambda table: None)


def total(weight: Any) -> Any:
    return 0.1 * ops.square(ops.sum(weight))


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("regularizer", ["l2", total], ids=["a sum", "none"])
@pytest.mark.parametrize("way", ["dense", "fused"])
def test_regularizers_count_shared_heads_once(comm: Any, way: str, regularizer: Any) -> None:
    def make() -> Any:
        return own(1, way, regularizer)

    losses, weights = alone(comm, lambda: (lambda whole: (train(whole), whole.get_weights()))(make()))
    model = parallelize(make(), comm, plan(1, way))
    near(train(model), losses, 1e-10)
    for got, expected in zip(gather_weights(model), weights, strict=True):
        near(got, expected, 1e-10)


@pytest.mark.long
@pytest.mark.ranks(min=2)
def test_activity_counts_shared_heads_once(comm: Any) -> None:
    """Regression: each rank added the outputs of a shared head to the loss."""
    trained_alike(comm, lambda: grouped(1, activity_regularizer="l2"), {"a": Column()})
    dense = L.Dense(HEADS, name="d", activity_regularizer="l2")
    model = keras.Sequential([keras.Input((WIDTH,)), dense])
    with pytest.raises(UsageError, match="under which ranks may share some parts"):
        parallelize(model, comm, {"d": Column(parts=(10, 2), units=(10, 1), gather=True)})


@pytest.mark.ranks(min=2)
def test_gathered_heads_and_lora(comm: Any) -> None:
    """Gathered weights have each head once; LoRA's other factor is whole, and receives gradients of all ranks."""

    def make() -> Any:
        dense = L.EinsumDense("bta,ahd->bthd", (TOKENS, 1, SIZE), bias_axes="hd", name="d")
        return filled(keras.Sequential([keras.Input((TOKENS, WIDTH)), dense]))

    def adapted() -> Any:
        model = own(1, "dense")
        for name in ("q", "k", "v"):
            getattr(model.get_layer("a"), name).enable_lora(2)
        return filled(model)

    same(make, {"d": Column(units=1, gather=True)}, comm, values(2, TOKENS, WIDTH))
    same(adapted, plan(1, "dense"), comm, values(2, TOKENS, WIDTH), tolerance=FLOAT32)


def test_unsupported_numbers_of_heads_are_refused(comm: Any) -> None:
    """With 7 heads of queries and several of keys, a rank's queries would belong to two of these."""
    if comm.size < 3:
        pytest.skip("fewer ranks")
    keys = comm.size // 2 if comm.size % 2 == 0 else 2
    heads = keys * (comm.size + 1)
    with pytest.raises(UsageError, match=f"{heads} heads of queries and {keys} of keys and values cannot be sharded"):
        parallelize(grouped(keys, heads), comm, {"a": Column()})
