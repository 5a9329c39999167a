"""Train a byte-level transformer in Keras in stages, save it, and continue with another number of stages.

    mpirun -n 2 python examples/pipeline_keras.py
    mpirun -n 4 python examples/pipeline_keras.py    # as root, or on fewer cores: see ci/env.sh

The model is a plain functional model; `ct.pipeline` puts a stage on each rank, and `fit` works unchanged. The full
model is saved as an ordinary Keras file, and loaded into half as many stages (two pipelines that train identically).
One process also trains on the same batches: losses and weights must be equal within rounding.
"""

from __future__ import annotations

import os
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # before TensorFlow is imported

import keras
import numpy as np

import commlib
import commlib_tensorflow as ct

WIDTH, LAYERS, HEADS, CONTEXT, ROWS, STEPS = 32, 2, 4, 32, 16, 8


def block(x: Any, number: int) -> Any:
    """Apply causal attention and an MLP, each with a norm before and a residual around."""
    layers = keras.layers
    normed = layers.LayerNormalization(name=f"norm_attention_{number}")(x)
    attention = layers.MultiHeadAttention(HEADS, WIDTH // HEADS, name=f"attention_{number}")
    x = layers.Add()([x, attention(normed, normed, use_causal_mask=True)])
    normed = layers.LayerNormalization(name=f"norm_mlp_{number}")(x)
    wide = layers.Dense(4 * WIDTH, "gelu", name=f"widen_{number}")(normed)
    return layers.Add()([x, layers.Dense(WIDTH, name=f"narrow_{number}")(wide)])


def make_model() -> Any:
    """Return the model, the same on every rank."""
    keras.utils.set_random_seed(0)
    text = keras.Input((CONTEXT,), dtype="int32")
    position_ids = keras.Input((CONTEXT,), dtype="int32")
    x = keras.layers.Embedding(256, WIDTH, name="bytes")(text)
    x = keras.layers.Add()([x, keras.layers.Embedding(CONTEXT, WIDTH, name="positions")(position_ids)])
    for number in range(LAYERS):
        x = block(x, number)
    logits = keras.layers.Dense(256, name="logits")(keras.layers.LayerNormalization(name="norm")(x))
    return keras.Model([text, position_ids], logits)


def compile_model(model: Any) -> None:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.SGD(0.3, momentum=0.9), loss=loss)


def data() -> tuple[list[Any], Any]:
    """Return windows of the source of Python's standard library: 2 * STEPS batches of ROWS."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("a*.py")))[: 1 << 18]
    stream = np.frombuffer(text, np.uint8).astype(np.int32)
    starts = np.random.default_rng(1).integers(len(stream) - CONTEXT, size=2 * STEPS * ROWS)
    windows = stream[starts[:, None] + np.arange(CONTEXT + 1)]
    position_ids = np.tile(np.arange(CONTEXT, dtype=np.int32), (len(windows), 1))
    return [windows[:, :-1], position_ids], windows[:, 1:]


def fit(model: Any, x: list[Any], y: Any) -> list[float]:
    """Train on each batch once; return the losses."""
    losses: list[float] = []
    seen = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: losses.append(logs["loss"]))
    model.fit(x, y, batch_size=ROWS, shuffle=False, verbose=0, callbacks=[seen])
    # Keras reports the mean over the batches so far.
    means = np.array(losses) * np.arange(1, len(losses) + 1)
    return [float(loss) for loss in np.diff(means, prepend=0.0)]


def main() -> None:
    comm = commlib.init()
    x, y = data()
    half = STEPS * ROWS
    first, second = ([part[:half] for part in x], y[:half]), ([part[half:] for part in x], y[half:])

    # A stage on each rank.
    pipe = ct.pipeline(make_model(), comm, schedule="1f1b", microbatches=4)
    compile_model(pipe)
    losses = fit(pipe, *first)
    if comm.rank == 0:
        print(pipe.picture())

    # Save the full model, as any Keras model.
    folder = comm.broadcast_object(tempfile.mkdtemp())
    pipe.save(f"{folder}/model.keras")
    comm.barrier()
    pipe.close()

    # Continue with half as many stages.
    mesh = commlib.Mesh(copy=2, pp=comm.size // 2)
    loaded = keras.models.load_model(f"{folder}/model.keras")
    pipe = ct.pipeline(loaded, mesh["pp"], schedule="gpipe", microbatches=2)
    compile_model(pipe)
    losses += fit(pipe, *second)

    weights = pipe.gather_weights()
    if comm.rank == 0:
        compare(losses, weights, first, second)
        print(f"{comm.size} stages, then {comm.size // 2}: as one process")


def compare(losses: list[float], weights: list[Any], *parts: Any) -> None:
    """Train in this process alone. Raises SystemExit if losses or weights differ."""
    alone = make_model()
    expected = []
    for x, y in parts:
        compile_model(alone)  # the momentum starts from zero, as in the pipeline
        expected += fit(alone, x, y)
    # float32: another order of sums over microbatches changes a loss by some 1e-6, and a weight by more after 16 steps.
    loss_gap = max(abs(one - other) for one, other in zip(losses, expected, strict=True))
    weight_gap = max(float(np.abs(one - other).max()) for one, other in zip(weights, alone.get_weights(), strict=True))
    if loss_gap > 1e-3 or weight_gap > 1e-2 or expected[-1] > 0.8 * expected[0]:
        raise SystemExit(f"losses differ by {loss_gap}, weights by {weight_gap}: {losses} {expected}")
    print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}; losses differ by {loss_gap:.1e}, weights by {weight_gap:.1e}")


if __name__ == "__main__":
    main()
