"""Plans in the style of Keras' LayoutMap: inputs and outputs of layers are whole, as in Keras."""

from __future__ import annotations

from typing import Any

import keras
import pytest
import tensorflow as tf

from commlib.errors import UsageError
from commlib.tensor_parallel import Column, Row, Sequence, Vocabulary
from commlib_tensorflow.tensor import parallelize
from tests.inputs.keras_pipelines import filled
from tests.tensorflow_adapter.tensor_oracle import in_float64, same, sequential, values, words

__all__ = ["in_float64"]

L = keras.layers
COLUMN, ROW = (None, "tp"), ("tp", None)


def styles(model: Any) -> dict[str, Any]:
    return {layer.name: layer.style for layer in model.layers if hasattr(layer, "style")}


def test_values_between_adjacent_divided_layers_stay_divided(comm: Any) -> None:
    def make() -> Any:
        block = [L.Dense(7, "relu", name="up"), L.Activation("tanh"), L.Dropout(0.5, name="drop")]
        return sequential(*block, L.Dense(6, name="down"), L.Dense(4, name="head"), shape=(5,))

    plan = {"(up|head)/kernel": COLUMN, "up/bias": ("tp",), "down/kernel": ROW}
    own = same(make, plan, comm, values(3, 5))
    expected = {"up": Column(), "drop": Sequence(-1), "down": Row(), "head": Column(gather=True)}
    assert styles(own) == expected


def test_other_values_are_gathered_and_split(comm: Any) -> None:
    def make() -> Any:
        given = keras.Input((5,))
        x = L.Dense(6, name="up")(given)
        down = L.Dense(6, name="down")(L.Activation("softmax")(x))
        other = L.Dense(6, name="other")(L.Concatenate()([x, down]))
        return filled(keras.Model(given, [other, L.Dense(6, name="last")(other)]))

    own = same(make, {"(up|other)/kernel": COLUMN, "(down|last)/kernel": ROW}, comm, values(3, 5))
    gathered, split = Column(gather=True), Row(split=True)
    assert styles(own) == {"up": gathered, "down": split, "other": gathered, "last": split}


def test_a_transformer(comm: Any) -> None:
    def make() -> Any:
        given = keras.Input((5,), dtype="int32")
        x = L.LayerNormalization(name="norm")(L.Embedding(11, 6, name="words")(given))
        x = L.Add()([x, L.MultiHeadAttention(5, 3, name="attention")(x, x)])
        x = L.EinsumDense("abc,cde->abde", (None, 5, 2), bias_axes="de", name="in")(x)
        x = L.EinsumDense("abcd,cde->abe", (None, 6), bias_axes="e", name="out")(x)
        return filled(keras.Model(given, L.Conv1D(7, 2, name="conv")(x)))

    plan = {
        "words/embeddings": ROW,
        "attention/(query|key|value)/kernel": (None, "tp", None),
        "attention/(query|key|value)/bias": ("tp", None),
        "attention/attention_output/kernel": ("tp", None, None),
        "^in/kernel": (None, "tp", None),
        "^out/kernel": ("tp", None, None),
        "conv/kernel": (None, None, "tp"),
    }
    own = same(make, plan, comm, words(11, 2, 5))
    expected = {"words": Vocabulary(), "attention": Column(), "in": Column(), "out": Row()}
    assert styles(own) == {**expected, "conv": Column(gather=True)}


def test_a_model_without_a_graph(comm: Any) -> None:
    class Block(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.words, self.up, self.down = L.Embedding(11, 6), L.Dense(7, name="up"), L.Dense(3, name="down")

        def call(self, x: Any) -> Any:
            return self.down(tf.sort(self.up(self.words(x))))

    def make() -> Any:
        model = Block()
        model(words(11, 2, 5))
        return filled(model)

    plan = {"embeddings": COLUMN, "up/kernel": COLUMN, "down/kernel": ROW}
    assert styles(same(make, plan, comm, words(11, 2, 5)))["up"] == Column(gather=True)


def test_invalid_arguments_are_refused(comm: Any) -> None:
    def refused(match: str, plan: Any) -> None:
        block = [L.Dense(7, name="up"), L.LayerNormalization(name="norm"), L.Dense(3, name="down")]
        with pytest.raises(UsageError, match=match):
            parallelize(sequential(*block, shape=(5,)), comm, plan)

    refused("use only one kind", {"up": Column(), "down/kernel": ROW})
    refused("norm/gamma cannot be sharded", {"norm/gamma": ("tp",)})
    refused("is sharded along 0, but .*down/kernel is not", {"down/kernel": ROW, "down/bias": ("tp",)})
    given = keras.Input((4, 5))
    model = keras.Model(given, L.MultiHeadAttention(4, 3, name="a")(given, given))
    with pytest.raises(UsageError, match="attention_output too"):
        parallelize(model, comm, {"a/query/kernel": (None, "tp", None)})
