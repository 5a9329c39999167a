"""A decoder-only transformer in plain Keras, and its batches."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from commlib.bench.steps.contract import Step, StepSizes

Batch = tuple[Any, Any]


class Embed(keras.layers.Layer):  # type: ignore[misc]  # Keras has no types
    """Embedding of tokens, with learned positions."""

    def __init__(self, sizes: StepSizes, **options: Any) -> None:
        super().__init__(**options)
        self.words = keras.layers.Embedding(sizes.vocabulary, sizes.width)
        self.positions = keras.layers.Embedding(sizes.context, sizes.width)
        self.length = sizes.context

    def build(self, input_shape: Any) -> None:
        """Create the vectors."""
        self.words.build(input_shape)
        self.positions.build((self.length,))

    def call(self, tokens: Any) -> Any:
        """Return (rows, context, width)."""
        return self.words(tokens) + self.positions(tf.range(self.length))


class CausalAttention(keras.layers.Layer):  # type: ignore[misc]  # Keras has no types
    """Causal attention of this rank's heads."""

    def __init__(self, sizes: StepSizes, **options: Any) -> None:
        super().__init__(**options)
        self.head, self.length = sizes.width // sizes.heads, sizes.context

    def call(self, q: Any, k: Any, v: Any) -> Any:
        """Return for each token the weighted sum of values up to its position."""
        shape = tf.shape(q)
        heads = (-1, self.length, q.shape[2] // self.head, self.head)
        q, k, v = (tf.transpose(tf.reshape(x, heads), (0, 2, 1, 3)) for x in (q, k, v))
        scores = tf.matmul(q, k, transpose_b=True) / self.head**0.5
        seen = tf.linalg.band_part(tf.ones((self.length, self.length)), -1, 0)
        mixed = tf.matmul(tf.nn.softmax(tf.where(seen > 0, scores, -1e9)), v)
        return tf.reshape(tf.transpose(mixed, (0, 2, 1, 3)), shape)

    def compute_output_shape(self, q: Any, *others: Any) -> Any:
        """Return the shape of q."""
        return q


def block(x: Any, sizes: StepSizes, number: int, parts: int = 1) -> Any:
    """Return the output of a block; with parts, of one rank's share of it."""
    layers, width = keras.layers, sizes.width
    h = layers.LayerNormalization(name=f"norm{number}")(x)
    q, k, v = (layers.Dense(width // parts, name=f"{name}{number}")(h) for name in "qkv")
    x = x + layers.Dense(width, name=f"out{number}")(CausalAttention(sizes, name=f"attend{number}")(q, k, v))
    h = layers.LayerNormalization(name=f"inner_norm{number}")(x)
    hidden = layers.Dense(4 * width // parts, activation="gelu", name=f"up{number}")
    mlp = keras.Sequential([hidden, layers.Dense(width, name=f"down{number}")], name=f"block{number}_mlp")
    return x + mlp(h)


def head(x: Any, sizes: StepSizes) -> Any:
    """Return the logits."""
    return keras.layers.Dense(sizes.vocabulary, name="logits")(keras.layers.LayerNormalization(name="last_norm")(x))


def transformer(sizes: StepSizes, parts: int = 1) -> Any:
    """Return the model, the same on every rank."""
    keras.utils.set_random_seed(0)
    tokens = keras.Input((sizes.context,), dtype="int32")
    x = Embed(sizes, name="embed")(tokens)
    for number in range(sizes.layers):
        x = block(x, sizes, number, parts)
    return keras.Model(tokens, head(x, sizes))


def batch_of(sizes: StepSizes, rank: int) -> Batch:
    """Return a batch of random tokens, and the token after each."""
    draw = np.random.default_rng(1 + rank)
    tokens = draw.integers(sizes.vocabulary, size=(sizes.rows, sizes.context + 1)).astype(np.int32)
    return tokens[:, :-1], tokens[:, 1:]


def join_batches(sizes: StepSizes, ranks: int) -> Batch:
    """Return the concatenated batches of all ranks."""
    inputs, targets = zip(*(batch_of(sizes, rank) for rank in range(ranks)), strict=True)
    return np.concatenate(inputs), np.concatenate(targets)


def plain_optimizer() -> Any:
    """Return the optimizer of every contender."""
    return keras.optimizers.SGD(0.05, momentum=0.9)


def loss_of() -> Any:
    """Return the mean cross entropy of the next token."""
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def make_step(model: Any, optimizer: Any, batch: Batch) -> Step:
    """Return a training step, by Keras' train_on_batch."""
    model.compile(optimizer, loss_of(), jit_compile=False)
    inputs, targets = (tf.constant(part) for part in batch)
    return lambda: float(model.train_on_batch(inputs, targets))
