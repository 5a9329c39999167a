"""Train a byte-level language model in Keras with mixtures of experts, and compare with one process.

    mpirun -n 2 python examples/moe_keras.py                              # Switch: each token goes to one of 8 experts
    mpirun -n 2 python examples/moe_keras.py --top-k 2                    # or to two
    mpirun -n 2 python examples/moe_keras.py --top-k 2 --capacity 1.25    # and full experts drop tokens

The model is plain Keras and trained by `fit`. Every rank has different rows of a batch and some of the experts; tokens
are sent to their experts. Rank 0 then trains the full model on full batches: losses and weights must be equal within
rounding. At the end the load of each expert is printed.
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
from commlib.expert.stats import draw_stats

WIDTH, LAYERS, HEADS, CONTEXT, ROWS, STEPS, SHOWN = 64, 2, 4, 64, 8, 40, 10


class Embed(keras.layers.Layer):  # type: ignore[misc]  # Keras has no types
    """An embedding of bytes, with learned positions.

    It uses matrix products, not lookups. With lookups, Adam in one process squares the gradients of repeated bytes
    separately, and on several ranks it squares their sum.
    """

    def build(self, input_shape: Any) -> None:
        """Make the vectors."""
        self.words = self.add_weight(shape=(256, WIDTH), initializer="random_normal", name="words")
        self.positions = self.add_weight(shape=(CONTEXT, WIDTH), initializer="random_normal", name="positions")

    def call(self, text: Any) -> Any:
        """Return the vectors."""
        return tf.matmul(tf.one_hot(text, 256), self.words) + self.positions


def make_model(ranks: Any, experts: ct.Experts) -> Any:
    """Return a model whose weights do not depend on the ranks that share the experts."""
    keras.utils.set_random_seed(0)
    layers = keras.layers
    text = keras.Input((CONTEXT,), dtype="int32")
    x = Embed(name="embed")(text)
    for block in range(LAYERS):
        h = layers.LayerNormalization(name=f"norm{block}")(x)
        attention = layers.MultiHeadAttention(HEADS, WIDTH // HEADS, name=f"attention{block}")
        x = x + attention(h, h, use_causal_mask=True)
        h = layers.LayerNormalization(name=f"inner_norm{block}")(x)
        mlp = keras.Sequential([layers.Dense(4 * WIDTH, "gelu"), layers.Dense(WIDTH)], name=f"block{block}_mlp")
        x = x + mlp(h)
    x = layers.LayerNormalization(name="last_norm")(x)
    model = keras.Model(text, layers.Dense(256, name="logits")(x))
    return ct.expertize(model, ranks, {"*_mlp": experts})


def batches() -> tuple[Any, Any]:
    """Return windows of the source of Python's standard library, and the next byte of each of their bytes."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("a*.py")))[: 1 << 18]
    stream = np.frombuffer(text, np.uint8).astype(np.int32)
    starts = np.random.default_rng(1).integers(len(stream) - CONTEXT, size=(STEPS, ROWS))
    windows = stream[starts[..., None] + np.arange(CONTEXT + 1)]
    return windows[..., :-1], windows[..., 1:]


class Losses(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """The loss of each batch, over all ranks; rank 0 prints some."""

    def __init__(self, comm: commlib.Communicator) -> None:
        super().__init__()
        self.comm, self.batch_losses, self._before = comm, list[float](), 0.0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Record the loss: Keras reports the mean of all batches so far."""
        total = (batch + 1) * float(logs["loss"])
        own, self._before = total - self._before, total
        self.batch_losses.append(float(self.comm.all_reduce(np.array([own]), "mean")[0]))
        if self.comm.rank == 0 and self.comm.size > 1 and batch % SHOWN == SHOWN - 1:
            print(f"step {batch + 1:>3}: loss {self.batch_losses[-1]:.3f}", flush=True)


def fitted(model: Any, optimizer: Any, comm: commlib.Communicator) -> list[float]:
    """Train on a rank's rows of each batch; return the losses of full batches."""
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    x, y = (np.split(part, comm.size, axis=1)[comm.rank].reshape(-1, CONTEXT) for part in batches())
    losses = Losses(comm)
    model.fit(x, y, batch_size=ROWS // comm.size, shuffle=False, verbose=0, callbacks=[losses])
    return losses.batch_losses


def optimizer_of() -> Any:
    return keras.optimizers.Adam(3e-3, global_clipnorm=1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--top-k", type=int, default=1)
    parser.add_argument(
        "--capacity", type=float, help="capacity of an expert, as a multiple of its even share (default: unlimited)"
    )
    arguments = parser.parse_args()
    # capacity_over: the dropped tokens must not depend on the number of ranks, else one process would drop others. It
    # counts the ranks that share experts: all ranks, if the number of experts is a multiple of the number of ranks.
    experts = ct.Experts(
        arguments.experts, top_k=arguments.top_k, capacity_factor=arguments.capacity, capacity_over="all"
    )
    comm = commlib.init()
    ct.init()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    mesh = commlib.Mesh(dp=-1)
    model = make_model(mesh, experts)
    losses = fitted(model, ct.DistributedOptimizer(optimizer_of(), mesh=mesh), comm)

    # Collective on all ranks: the stacks of all experts, and the statistics of all tokens.
    weights, stats = ct.gather_weights(model), ct.expert_stats(model)
    alone = comm.split(comm.rank, name="alone")
    if comm.rank > 0:
        return
    assert alone is not None
    print(draw_stats(stats))
    full = make_model(alone, experts)
    expected = fitted(full, optimizer_of(), alone)
    # float32: another order of sums changes a loss by some 1e-7, and a weight by more after these steps.
    loss_gap = max(abs(one - other) for one, other in zip(losses, expected, strict=True))
    weight_gap = max(float(np.abs(one - other).max()) for one, other in zip(weights, full.get_weights(), strict=True))
    if loss_gap > 1e-3 or weight_gap > 1e-2 or expected[-1] > 0.8 * expected[0]:
        raise SystemExit(f"losses differ by {loss_gap}, weights by {weight_gap}: {losses} {expected}")
    print(f"{experts.count} experts on {comm.size} ranks: loss {losses[0]:.3f} to {losses[-1]:.3f}, as in one process")
    print(f"(losses differ by {loss_gap:.1e} at most, weights by {weight_gap:.1e})")


if __name__ == "__main__":
    main()
