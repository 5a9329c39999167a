"""Pairs of axes in a mesh of 2 x 2 train a Keras transformer as one process does, in float64."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from commlib import Mesh
from commlib_tensorflow import (
    Column,
    DistributedOptimizer,
    Row,
    Vocabulary,
    context,
    gather_weights,
    parallelize,
    pipeline,
    vocabulary_cross_entropy,
)
from tests.inputs.keras_pipelines import in_float64

__all__ = ["in_float64"]  # a fixture

WORDS, WIDTH, SIZE, HEADS, TOKENS, ROWS, STEPS = 13, 8, 3, 3, 7, 4, 3  # odd heads, words and tokens

pytestmark = pytest.mark.ranks(min=4, max=4)

L = keras.layers


class Attend(keras.layers.Layer):  # type: ignore[misc]  # Keras has no types
    """Causal attention over the local heads, and over a divided sequence if there is an axis."""

    def __init__(self, axis: Any, **options: Any) -> None:
        super().__init__(**options)
        self.axis_of_sequence = axis

    def call(self, q: Any, k: Any, v: Any) -> Any:
        tokens, width = q.shape[1:]
        q, k, v = (tf.transpose(tf.reshape(x, (-1, tokens, width // SIZE, SIZE)), (0, 2, 1, 3)) for x in (q, k, v))
        if self.axis_of_sequence is not None:
            out = context.attention(q, k, v, self.axis_of_sequence, causal=True, length=TOKENS)
        else:
            seen = np.tril(np.ones((TOKENS, TOKENS), bool))
            out = tf.matmul(tf.nn.softmax(tf.where(seen, tf.matmul(q, k, transpose_b=True) / SIZE**0.5, -np.inf)), v)
        return tf.reshape(tf.transpose(out, (0, 2, 1, 3)), (-1, tokens, width))

    def compute_output_shape(self, q: Any, *others: Any) -> Any:
        return q


def make(tokens: int, axis: Any = None) -> Any:
    keras.utils.set_random_seed(0)
    text, places = (keras.Input((tokens,), dtype="int32", name=name) for name in ("text", "places"))
    x = L.Embedding(WORDS, WIDTH, name="words")(text) + L.Embedding(TOKENS, WIDTH, name="positions")(places)
    h = L.LayerNormalization(name="norm")(x)
    q, k, v = (L.Dense(HEADS * SIZE, name=name)(h) for name in "qkv")
    x = x + L.Dense(WIDTH, name="out")(Attend(axis, name="attend")(q, k, v))
    h = L.LayerNormalization(name="inner")(x)
    x = x + L.Dense(WIDTH, name="down")(L.Dense(11, activation="gelu", name="up")(h))
    return keras.Model([text, places], L.Dense(WORDS, name="logits")(L.LayerNormalization(name="last")(x)))


PLAN: Any = {
    "words": Vocabulary(), **{name: Column(units=HEADS) for name in "qkv"}, "out": Row(units=HEADS), "up": Column(),
    "down": Row(), "logits": Vocabulary(),
}  # fmt: skip


def batch(step: int) -> tuple[Any, Any]:
    text = np.random.default_rng(step).integers(WORDS, size=(ROWS, TOKENS + 1), dtype=np.int32)
    return text[:, :-1], text[:, 1:]


def optimizer_of() -> Any:
    return keras.optimizers.AdamW(0.01, global_clipnorm=0.5)


def alone(*, adds_rows: bool) -> tuple[list[float], list[Any]]:
    """Train in one process. adds_rows: gradient rows of an embedding for the same word are summed first.

    Keras squares each row separately, in norms and moments. Stages sum microbatches, and so rows.
    """
    model, optimizer, losses = make(TOKENS), optimizer_of(), []
    for step in range(STEPS):
        x, y = batch(step)
        with tf.GradientTape() as tape:
            logits = model([x, np.broadcast_to(np.arange(TOKENS), x.shape)])
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(
            list(map(tf.convert_to_tensor, gradients)) if adds_rows else gradients, model.trainable_variables
        )
        losses.append(float(loss))
    return losses, model.get_weights()


# In the usual run PyTorch covers all pairs; smaller models cover "dp tp" in test_tensor_mesh.py, "pp tp" in
# test_tensor_state.py, and "pp dp" in test_pipeline_replicas.py.
@pytest.mark.parametrize("axes", ["cp tp", "pp cp", "dp tp", "pp tp", "pp dp", "dp cp"])
def test_pairs(comm: Any, axes: str) -> None:
    sizes: Any = {axis: 2 if axis in axes.split() else 1 for axis in ("pp", "dp", "cp", "tp")}
    mesh = Mesh(**sizes)
    cp, dp = mesh["cp"], mesh["dp"]
    places = np.asarray(context.position_ids(TOKENS, cp))
    model = parallelize(make(len(places), cp), mesh["tp"], PLAN, divided_output=True)
    staged = mesh["pp"].size > 1
    if staged:
        model = pipeline(model, mesh["pp"], schedule="1f1b", microbatches=2)

    def loss_of(targets: Any, logits: Any) -> Any:
        total = vocabulary_cross_entropy(logits, tf.cast(targets, tf.int64), mesh["tp"], reduction="sum")
        return context.loss_mean(total, tf.size(targets), cp)

    model.compile(DistributedOptimizer(optimizer_of(), mesh=mesh), loss_of)
    losses, weights = comm.broadcast_object(alone(adds_rows=staged) if comm.rank == 0 else None)
    for step, loss_alone in enumerate(losses):
        x, y = (np.asarray(context.shard_sequence(np.split(part, dp.size)[dp.rank], cp)) for part in batch(step))
        history = model.fit((x, np.broadcast_to(places, x.shape)), y, batch_size=ROWS, shuffle=False, verbose=0).history
        # Sums are in another order: some ulps, which the first steps of Adam amplify.
        mean = sum(dp.all_gather_object(history["loss"][0])) / dp.size
        assert mean == pytest.approx(loss_alone, rel=1e-11)
    result = model.gather_weights() if staged else gather_weights(model)
    for got, expected in zip(result, weights, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-10)  # Adam divides by small roots
    mesh.close()
