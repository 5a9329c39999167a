"""auto on transformers of Keras layers: a rank of 2 has at most 0.55 of the weights, and results match one process."""

from __future__ import annotations

import math
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

from commlib.tensor_parallel import Vocabulary
from commlib_tensorflow.tensor import parallelize
from tests.inputs.keras_pipelines import filled
from tests.tensorflow_adapter.tensor_oracle import alone, in_float64, near, near_shard, run, same, words

__all__ = ["in_float64"]

L = keras.layers
WORDS, WIDTH, HEADS, TOKENS = 40, 24, 4, 6


def rotated(x: Any) -> Any:
    """Compute rotary positions, of (rows, tokens, heads, features)."""
    size = x.shape[-1]
    angles = ops.einsum("i,j->ij", ops.arange(TOKENS, dtype=x.dtype), 100.0 ** (-ops.arange(0, size, 2) / size))
    both = ops.concatenate([angles, angles], -1)[None, :, None]
    first, last = ops.split(x, 2, -1)
    return x * ops.cos(both) + ops.concatenate([-last, first], -1) * ops.sin(both)


class Attention(keras.layers.Layer):  # type: ignore[misc]
    """Attention of dense layers as models write it: with fewer heads of keys, or fused."""

    def __init__(self, kv: int = HEADS, rope: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.kv, self.rope, self.size = kv, rope, WIDTH // HEADS
        widths = {"q": WIDTH, "k": kv * self.size, "v": kv * self.size, "o": WIDTH}
        self.inner = {name: L.Dense(width, use_bias=not rope, name=name) for name, width in widths.items()}

    def build(self, shape: Any) -> None:
        for layer in self.inner.values():
            layer.build(shape)

    def call(self, x: Any) -> Any:
        rows, tokens = ops.shape(x)[:2]
        q, k, v = (ops.reshape(self.inner[name](x), (rows, tokens, -1, self.size)) for name in "qkv")
        if self.rope:
            q, k = rotated(q), rotated(k)
        k, v = (ops.repeat(one, HEADS // self.kv, axis=2) for one in (k, v))
        scores = ops.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(self.size)
        seen = ops.tril(ops.ones((tokens, tokens), dtype="bool"))
        weights = ops.softmax(ops.where(seen, scores, -1e9))
        return self.inner["o"](ops.reshape(ops.einsum("bhqk,bkhd->bqhd", weights, v), (rows, tokens, -1)))


def feed(x: Any, gated: bool, at: int) -> Any:
    if gated:
        h = L.Multiply()([L.Dense(64, "silu", name=f"gate{at}")(x), L.Dense(64, name=f"up{at}")(x)])
    else:
        h = L.Dropout(0.0)(L.Dense(96, "gelu", name=f"up{at}")(x))
    return L.Dense(WIDTH, name=f"down{at}")(h)


def gpt() -> Any:
    """Keras' attention, learned positions, and logits by the transposed embedding."""
    ids = keras.Input((TOKENS,), dtype="int32")
    table = L.ReversibleEmbedding(WORDS, WIDTH, name="words")
    x = table(ids) + L.Embedding(TOKENS, WIDTH, name="positions")(ops.zeros_like(ids) + ops.arange(TOKENS))
    for at in range(1):
        y = L.LayerNormalization()(x)
        x = x + L.MultiHeadAttention(HEADS, WIDTH // HEADS, name=f"a{at}")(y, y, use_causal_mask=True)
        x = x + feed(L.LayerNormalization()(x), False, at)
    return filled(keras.Model(ids, table(L.LayerNormalization()(x), reverse=True)))


def llama(attention: Any = None) -> Any:
    """Rotary positions, grouped heads, gated layers, separate logits."""
    ids = keras.Input((TOKENS,), dtype="int32")
    x = L.Embedding(WORDS, WIDTH, name="words")(ids)
    for at in range(1):
        y = L.RMSNormalization()(x)
        x = x + (Attention(2, True, name=f"a{at}")(y) if attention is None else attention(at)(y, y))
        x = x + feed(L.RMSNormalization()(x), True, at)
    return filled(keras.Model(ids, L.Dense(WORDS, use_bias=False, name="head")(L.RMSNormalization()(x))))


def grouped() -> Any:
    return llama(lambda at: L.GroupQueryAttention(WIDTH // HEADS, HEADS, 2, name=f"a{at}"))


def bert() -> Any:
    """Segments, a transform before the logits, and a pooled output."""
    ids, segments = (keras.Input((TOKENS,), dtype="int32") for _ in range(2))
    x = L.Embedding(WORDS, WIDTH, name="words")(ids) + L.Embedding(3, WIDTH, name="segments")(segments)
    x = L.LayerNormalization()(x)
    for at in range(1):
        x = L.LayerNormalization()(x + Attention(name=f"a{at}")(x))
        x = L.LayerNormalization()(x + feed(x, False, at))
    pooled = L.Dense(2, name="classes")(L.Dense(WIDTH, "tanh", name="pool")(x[:, 0]))
    logits = L.Dense(WORDS, name="head")(L.LayerNormalization()(L.Dense(WIDTH, "gelu", name="transform")(x)))
    return filled(keras.Model([ids, segments], [logits, pooled]))


@pytest.mark.ranks(min=2, max=2)
@pytest.mark.parametrize(
    ("make", "inputs"),
    [
        (gpt, 1),
        (llama, 1),
        (grouped, 1),
        (bert, 2),
    ],
)
def test_auto(comm: Any, make: Any, inputs: int) -> None:
    """Regression: implicit repeats and transposed tables were unknown, and left whole."""
    whole, own = make(), make()
    parallelize(own, comm, "auto", report=lambda table: None)
    sizes = [sum(np.prod(v.shape) for v in model.trainable_variables) for model in (own, whole)]
    assert sizes[0] <= 0.55 * sizes[1]
    x = [words(WORDS if at == 0 else 3, 2, TOKENS, seed=at).astype(np.int32) for at in range(inputs)]

    def call(model: Any) -> Any:
        return lambda *given: model(given[0] if inputs == 1 else list(given))

    shapes = [tuple(out.shape) for out in keras.tree.flatten(call(whole)(*x))]
    expected = alone(comm, lambda: run(call(whole), whole.trainable_variables, x, shapes, True))
    got = run(call(own), own.trainable_variables, x, shapes, True)
    for one, other in zip(got[0], expected[0], strict=True):
        near(one, other, 1e-10)
    for variable, one, other in zip(own.trainable_variables, got[2], expected[2], strict=True):
        near_shard(one, other, variable, 1e-10)


class Tied(keras.Model):  # type: ignore[misc]
    """Features of words, and logits from the same table."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.words = L.ReversibleEmbedding(11, 6, name="words", **options)

    def call(self, ids: Any) -> Any:
        return self.words(tf.tanh(self.words(ids)), reverse=True)


@pytest.mark.parametrize(
    "options",
    [{"logit_soft_cap": 2.0}, {"tie_weights": False}],
    ids=["tied", "untied"],
)
def test_reversible_embedding(comm: Any, options: Any) -> None:
    def make() -> Any:
        model = Tied(**options)
        model(words(11, 2, 3))
        return filled(model)

    same(make, {"words": Vocabulary(gather=True)}, comm, words(11, 2, 3))


def test_a_table_with_another_user_stays_whole(comm: Any) -> None:
    class Head(keras.layers.Layer):  # type: ignore[misc]
        def __init__(self, table: Any) -> None:
            super().__init__()
            self.table = table

        def call(self, x: Any) -> Any:
            return ops.matmul(x, ops.transpose(self.table.embeddings))

    ids = keras.Input((TOKENS,), dtype="int32")
    table = L.Embedding(WORDS, WIDTH, name="words")
    model = filled(keras.Model(ids, Head(table)(feed(table(ids), False, 0))))
    parallelize(model, comm, "auto", report=lambda rows: None)
    assert {layer.name for layer in model.layers if hasattr(layer, "style")} == {"up0", "down0"}
