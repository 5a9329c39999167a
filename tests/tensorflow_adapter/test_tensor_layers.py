"""Divided layers of Keras equal plain ones: outputs, and gradients of inputs and weights."""

from __future__ import annotations

from functools import partial
from typing import Any

import keras
import pytest

from commlib.errors import UsageError
from commlib.tensor_parallel import Column, Replicate, Row, Sequence, Vocabulary
from commlib_tensorflow.tensor import parallelize
from tests.tensorflow_adapter.tensor_oracle import in_float64, same, sequential, values, words

__all__ = ["in_float64"]

L = keras.layers


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("width", [8, 7])
def test_dense(comm: Any, width: int, compiled: bool) -> None:
    def make() -> Any:
        return sequential(L.Dense(width, "gelu", name="up"), L.Dense(5, "tanh", name="down"), shape=(3, 6))

    same(make, {"up": Column(), "down": Row()}, comm, values(2, 3, 6), compiled=compiled)


def test_dense_alone(comm: Any) -> None:
    def make(activation: str) -> Any:
        return sequential(L.Dense(12, activation, name="d"), shape=(9,))

    x = values(2, 9)
    same(lambda: make("softmax"), {"d": Column(gather=True)}, comm, x)
    same(lambda: make("relu"), {"d": Column(gather=True, parts=(5, 7))}, comm, x)
    same(lambda: make("softmax"), {"d": Row(split=True)}, comm, x)
    same(lambda: make("linear"), {"d": Vocabulary(gather=True)}, comm, x)


@pytest.mark.parametrize("length", [4, 7])
def test_dense_on_a_sequence(comm: Any, length: int) -> None:
    def make() -> Any:
        return sequential(L.Dense(6, "relu", name="up"), L.Dense(5, "tanh", name="down"), shape=(length, 6))

    plan = {"up": Column(sequence=1), "down": Row(sequence=-2)}
    same(make, plan, comm, values(2, length, 6), sequence=1)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("abc,cde->abde", (None, 5, 4), "de"), ("abde,dec->abc", (None, 3), "c")),
        (("...x,xy->...y", 5, "y"), ("...y,yz->...z", 4, "z")),
        (("ax...,xy->ay...", 5, "y"), ("ay...,yz->az...", 4, "z")),
        (("abc,cde->abde", (None, 5, 4), "e"), ("abde,dec->abc", (None, 3), "c")),
        (("abc,ecd->abed", (None, 5, 4), None), ("abed,edc->abc", (None, 6), None)),
    ],
)
def test_einsum(comm: Any, first: Any, second: Any) -> None:
    """Any dimension may be divided; ranks may share a bias."""

    def make() -> Any:
        up = L.EinsumDense(*first[:2], "tanh", bias_axes=first[2], name="up")
        return sequential(up, L.EinsumDense(*second[:2], bias_axes=second[2], name="down"), shape=(3, 6))

    same(make, {"up": Column(), "down": Row()}, comm, values(2, 3, 6))


def test_einsum_gathers_and_splits(comm: Any) -> None:
    def make() -> Any:
        up = L.EinsumDense("abc,cde->abde", (None, 5, 4), "softmax", bias_axes="de", name="up")
        return sequential(up, L.EinsumDense("abde,dec->abc", (None, 3), bias_axes="c", name="down"), shape=(3, 6))

    same(make, {"up": Column(gather=True)}, comm, values(2, 3, 6))
    same(make, {"down": Row(split=True)}, comm, values(2, 3, 6))


def test_einsum_on_a_sequence(comm: Any) -> None:
    def make() -> Any:
        up = L.EinsumDense("abc,cde->abde", (None, 5, 4), bias_axes="e", name="up")
        return sequential(up, L.EinsumDense("abde,dec->abc", (None, 3), bias_axes="c", name="down"), shape=(7, 6))

    same(make, {"up": Column(sequence=1), "down": Row(sequence=1)}, comm, values(2, 7, 6), sequence=1)


def test_an_indivisible_einsum_is_refused(comm: Any) -> None:
    for style in (Column(), Row()):
        model = sequential(L.EinsumDense("abc,c->abc", (None, 6), name="e"), shape=(3, 6))
        with pytest.raises(UsageError, match="leave it unsharded"):
            parallelize(model, comm, {"e": style})


@pytest.mark.parametrize(
    ("kind", "shape", "options"),
    [
        (L.Conv1D, (7, 3), {"padding": "causal", "dilation_rate": 2}),
        (L.Conv1D, (7, 3), {"strides": 2}),
        (L.Conv2D, (5, 6, 3), {"padding": "same"}),
        (L.Conv3D, (3, 4, 3, 2), {}),
    ],
)
def test_convolutions(comm: Any, kind: Any, shape: Any, options: Any) -> None:
    def make() -> Any:
        return sequential(kind(7, 2, activation="relu", name="up", **options), kind(4, 1, name="down"), shape=shape)

    x = values(2, *shape)
    same(make, {"up": Column(), "down": Row()}, comm, x)
    same(make, {"up": Column(gather=True), "down": Row(split=True)}, comm, x)


def test_groups_are_refused(comm: Any) -> None:
    model = sequential(L.Conv1D(4, 2, groups=2, name="c"), shape=(5, 4))
    with pytest.raises(UsageError, match="groups=2"):
        parallelize(model, comm, {"c": Column()}, divided_output=True)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("style", [Vocabulary(), Column(gather=True)])
def test_embedding(comm: Any, style: Any, compiled: bool) -> None:
    def make() -> Any:
        return sequential(L.Embedding(11, 6, name="e"), L.Dense(3), shape=(5,), dtype="int32")

    same(make, {"e": style}, comm, words(11, 2, 5), compiled=compiled)


def test_embedding_of_features_that_stay_divided(comm: Any) -> None:
    def make() -> Any:
        return sequential(L.Embedding(11, 6, name="e"), L.Dense(3, name="d"), shape=(5,), dtype="int32")

    same(make, {"e": Column(), "d": Row()}, comm, words(11, 2, 5))


def test_invalid_words_are_refused(comm: Any) -> None:
    model = sequential(L.Embedding(11, 6, name="e"), shape=(5,), dtype="int32")
    parallelize(model, comm, {"e": Vocabulary()})
    for wrong in (-1, 11):
        with pytest.raises(UsageError, match="0 to 10"):
            model(words(1, 2, 5) + wrong)


@pytest.mark.parametrize("length", [4, 7])
@pytest.mark.parametrize(
    "norm",
    [
        lambda: L.LayerNormalization(name="norm"),
        *(partial(L.LayerNormalization, name="norm", **without) for without in ({"center": False}, {"scale": False})),
        lambda: L.RMSNormalization(name="norm"),
    ],
)
def test_a_block_on_shards(comm: Any, norm: Any, length: int) -> None:
    def make() -> Any:
        block = [norm(), L.Dense(7, "silu", name="up"), L.Dense(6, name="down"), L.Activation("tanh", name="act")]
        return sequential(*block, shape=(None, 6))

    plan = {"norm": Sequence(), "up": Column(sequence=1), "down": Row(sequence=1), "act": Sequence()}
    same(make, plan, comm, values(2, length, 6), sequence=1)


def test_layers_that_see_a_part_are_refused(comm: Any) -> None:
    def refused(layer: Any, style: Any, match: str) -> None:
        with pytest.raises(UsageError, match=f"{match}|needs a full dimension"):
            parallelize(sequential(layer, shape=(4, 6)), comm, {layer.name: style}, divided_output=True)

    refused(L.LayerNormalization(), Sequence(-1), "see only a shard")
    refused(L.BatchNormalization(), Sequence(), "has weights")
    refused(L.MaxPooling1D(), Sequence(), "several positions")
    refused(L.SpatialDropout1D(0.5), Sequence(), "one number for several")
    refused(L.Dropout(0.5, noise_shape=(None, 1, None)), Sequence(), "one number for several")
    refused(L.Dense(4, "softmax"), Column(), "needs all outputs")
    refused(L.Dense(4), Sequence(), "has weights")
    refused(L.LSTM(4), Column(), "Column is for .*Dense")


def test_whole_layers_into_divided_ones(comm: Any) -> None:
    def make() -> Any:
        return sequential(L.Dense(6, name="k"), L.Dense(7, "relu", name="up"), L.Dense(2, name="down"), shape=(5,))

    same(make, {"k": Replicate(), "up": Column(), "down": Row()}, comm, values(3, 5))


def test_a_patched_call(comm: Any) -> None:
    """Regression: a patched call bypassed the division, and the input's gradient was a rank's part."""

    def patched(at: str) -> Any:
        model = sequential(keras.layers.Dense(8, name="up"), keras.layers.Dense(4, name="down"), shape=(6,))
        layer = model.get_layer(at)
        plain = layer.call
        layer.call = lambda *args, **options: plain(*args, **options) * 2
        return model

    for at in ("up", "down"):
        with pytest.raises(UsageError, match=f"{at} has its call replaced on the instance"):
            parallelize(patched(at), comm, {"up": Column(), "down": Row()})
    x = keras.Input((5, 8))
    attention = keras.layers.MultiHeadAttention(comm.size, 2, name="heads")
    model = keras.Model(x, attention(x, x))
    attention.query_dense.call = attention.query_dense.call
    with pytest.raises(UsageError, match="heads, or query within it, has its call replaced on the instance"):
        parallelize(model, comm, {"heads": Column()})
