"""Train a byte-level GPT in Keras with tensor, context, pipeline and data parallelism, and compare with one process.

    mpirun -n 2 python examples/gpt_keras.py                # tp=2: layers are sharded
    mpirun -n 2 python examples/gpt_keras.py --cp 2 --tp 1  # sequences are sharded
    mpirun -n 4 python examples/gpt_keras.py                # dp=2, tp=2; or --pp 2, or --cp 2

The model is plain Keras and trained by `fit`. A plan lists the sharded layers; `mesh` has the axes, and the remaining
ranks are replicas. One process also trains the unsharded model: losses and weights must be equal within rounding.
"""

from __future__ import annotations

import argparse
import os
import sysconfig
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf

import commlib
import commlib_tensorflow as ct

WIDTH, LAYERS, HEADS, CONTEXT, ROWS, STEPS = 64, 2, 4, 33, 8, 8

PLAN: dict[str, Any] = {
    "words": ct.Vocabulary(),
    "[qkv]*": ct.Column(units=HEADS),
    "out*": ct.Row(units=HEADS),
    "up*": ct.Column(),
    "down*": ct.Row(),
    "logits": ct.Vocabulary(),
}


class CausalAttention(keras.layers.Layer):  # type: ignore[misc]  # Keras has no types
    """Causal attention of this rank's heads, over a sequence that is sharded along an axis."""

    def __init__(self, axis: Any, **options: Any) -> None:
        super().__init__(**options)
        self.axis_of_sequence = axis

    def call(self, q: Any, k: Any, v: Any) -> Any:
        """Return the attention of this rank's tokens to all earlier tokens."""
        size = WIDTH // HEADS
        shape = tf.shape(q)
        q, k, v = (
            tf.transpose(tf.reshape(x, (-1, x.shape[1], x.shape[2] // size, size)), (0, 2, 1, 3)) for x in (q, k, v)
        )
        if self.axis_of_sequence is not None:
            mixed = ct.context.attention(q, k, v, self.axis_of_sequence, causal=True, length=CONTEXT)
        else:
            scores = tf.matmul(q, k, transpose_b=True) / size**0.5
            mask = tf.linalg.band_part(tf.ones((CONTEXT, CONTEXT)), -1, 0)
            mixed = tf.matmul(tf.nn.softmax(tf.where(mask > 0, scores, -1e9)), v)
        return tf.reshape(tf.transpose(mixed, (0, 2, 1, 3)), shape)

    def compute_output_shape(self, q: Any, *others: Any) -> Any:
        """Return the shape of q."""
        return q


def make_model(tokens: int, axis: Any = None) -> Any:
    """Return a model for sequences of `tokens` tokens, the same on every rank."""
    keras.utils.set_random_seed(0)
    layers = keras.layers
    text, position_ids = (keras.Input((tokens,), dtype="int32", name=name) for name in ("text", "position_ids"))
    x = layers.Embedding(256, WIDTH, name="words")(text) + layers.Embedding(CONTEXT, WIDTH, name="positions")(
        position_ids
    )
    for block in range(LAYERS):
        h = layers.LayerNormalization(name=f"norm{block}")(x)
        q, k, v = (layers.Dense(WIDTH, name=f"{name}{block}")(h) for name in "qkv")
        x = x + layers.Dense(WIDTH, name=f"out{block}")(CausalAttention(axis, name=f"attend{block}")(q, k, v))
        h = layers.LayerNormalization(name=f"inner_norm{block}")(x)
        h = layers.Dense(4 * WIDTH, activation="gelu", name=f"up{block}")(h)
        x = x + layers.Dense(WIDTH, name=f"down{block}")(h)
    x = layers.LayerNormalization(name="last_norm")(x)
    return keras.Model([text, position_ids], layers.Dense(256, name="logits")(x))


def batches() -> list[tuple[Any, Any]]:
    """Return windows of the source of Python's standard library, and the next byte of each of their bytes."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("a*.py")))[: 1 << 18]
    stream = np.frombuffer(text, np.uint8).astype(np.int32)
    starts = np.random.default_rng(1).integers(len(stream) - CONTEXT, size=(STEPS, ROWS))
    windows = stream[starts[..., None] + np.arange(CONTEXT + 1)]
    return [(window[:, :-1], window[:, 1:]) for window in windows]


def optimizer_of() -> Any:
    # Norms and moments in Keras square repeated rows of an embedding separately; stages and ranks sum them first.
    return keras.optimizers.SGD(0.2, momentum=0.9)


def fitted(model: Any, x: Any, position_ids: Any, y: Any) -> float:
    """Train on one batch; return its loss."""
    history = model.fit((x, position_ids), y, batch_size=len(x), shuffle=False, verbose=0).history
    return float(history["loss"][0])


def in_one_process(batches: list[tuple[Any, Any]]) -> tuple[list[float], Any]:
    model = make_model(CONTEXT)
    model.compile(optimizer_of(), keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
    position_ids = np.broadcast_to(np.arange(CONTEXT, dtype=np.int32), (ROWS, CONTEXT))
    return [fitted(model, x, position_ids, y) for x, y in batches], model


class ParallelTraining:
    """The same training, run on all ranks of a mesh."""

    def __init__(self, mesh: commlib.Mesh) -> None:
        self.mesh, cp = mesh, mesh["cp"]
        self.position_ids = np.asarray(ct.context.position_ids(CONTEXT, cp)).astype(np.int32)
        model = make_model(len(self.position_ids), cp if cp.size > 1 else None)
        model = ct.parallelize(model, mesh["tp"], PLAN, divided_output=True)
        self.is_staged = mesh["pp"].size > 1
        self.model = ct.pipeline(model, mesh["pp"], schedule="1f1b", microbatches=2) if self.is_staged else model
        optimizer = optimizer_of()
        if mesh["dp", "cp"].size > 1:
            optimizer = ct.DistributedOptimizer(optimizer, mesh=mesh)
        self.model.compile(optimizer, self.loss)

    def loss(self, targets: Any, logits: Any) -> Any:
        """Return the mean over the tokens of all shards of the sequences."""
        targets = tf.cast(targets, tf.int64)
        total = ct.vocabulary_cross_entropy(logits, targets, self.mesh["tp"], reduction="sum")
        return ct.context.loss_mean(total, tf.size(targets), self.mesh["cp"])

    def step(self, x: Any, y: Any) -> float:
        """Train on this rank's rows and tokens of a batch; return the loss of these rows."""
        replicas, place = self.mesh.shape.size("dp"), self.mesh.coordinate("dp")
        own = [
            np.asarray(ct.context.shard_sequence(np.split(part, replicas)[place], self.mesh["cp"])) for part in (x, y)
        ]
        return fitted(self.model, own[0], np.broadcast_to(self.position_ids, own[0].shape), own[1])

    def weights(self) -> list[Any]:
        """Return the weights of the unsharded model."""
        result: list[Any] = self.model.gather_weights() if self.is_staged else ct.gather_weights(self.model)
        return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for axis, size in (("pp", 1), ("cp", 1), ("tp", 2)):
        parser.add_argument(f"--{axis}", type=int, default=size)
    arguments = parser.parse_args()
    comm = commlib.init()
    ct.init()
    mesh = commlib.Mesh(pp=arguments.pp, dp=-1, cp=arguments.cp, tp=arguments.tp)
    text = batches()
    training = ParallelTraining(mesh)
    losses = []
    for x, y in text:
        own = training.step(x, y)
        losses.append(float(sum(mesh["dp"].all_gather_object(own))) / mesh["dp"].size)

    weights = training.weights()
    if comm.rank > 0:
        return
    expected, model = in_one_process(text)
    # float32: another order of sums changes a loss by some 1e-7, and a weight by more after some steps.
    loss_gap = max(abs(one - other) for one, other in zip(losses, expected, strict=True))
    weight_gap = max(float(np.abs(one - other).max()) for one, other in zip(weights, model.get_weights(), strict=True))
    if loss_gap > 1e-4 or weight_gap > 1e-2 or expected[-1] > 0.8 * expected[0]:
        raise SystemExit(f"losses differ by {loss_gap}, weights by {weight_gap}: {losses} {expected}")
    print(f"{mesh.shape}: loss {losses[0]:.3f} to {losses[-1]:.3f}, as in one process")
    print(f"(losses differ by {loss_gap:.1e} at most, weights by {weight_gap:.1e})")


if __name__ == "__main__":
    main()
