"""Train one model in two frameworks at once: this rank in TensorFlow, another one in PyTorch.

    mpirun -n 1 python examples/mixed/torch_half.py : -n 1 python examples/mixed/tf_half.py

This is a translation of `torch_half.py`, which explains it.
"""

from __future__ import annotations

import os
import sys
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf

import commlib_tensorflow as hvd

STEPS, ROWS, FEATURES, HIDDEN = 200, 16, 8, 32
LEARNING_RATE = 0.1


def main() -> int:
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    random = np.random.default_rng(0)  # the same numbers, in the same order, in both halves
    shapes = [(FEATURES, HIDDEN), (HIDDEN,), (HIDDEN, 1), (1,)]
    initial = [(random.normal(size=shape) * 0.3).astype(np.float32) for shape in shapes]
    secret = random.normal(size=(FEATURES, 1))
    weights = [tf.Variable(array) for array in initial]

    def train_on(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            hidden = tf.tanh(x @ weights[0] + weights[1])
            loss = tf.reduce_mean(tf.square(hidden @ weights[2] + weights[3] - y))
        gradients = hvd.grouped_allreduce(tape.gradient(loss, weights), name="gradients")
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.assign_sub(LEARNING_RATE * gradient)
        return hvd.allreduce(loss, name="loss")

    step = tf.function(train_on)
    losses = []
    for _ in range(STEPS):
        x = random.normal(size=(size * ROWS, FEATURES)).astype(np.float32)
        y = np.tanh(x @ secret).astype(np.float32)
        mine = slice(rank * ROWS, (rank + 1) * ROWS)
        losses.append(float(step(x[mine], y[mine])))

    everyone = hvd.allgather_object([weight.numpy().tobytes() for weight in weights], name="weights")
    equal = all(other == everyone[0] for other in everyone)
    fell = losses[-1] < 0.2 * losses[0]
    print(f"rank {rank}, TensorFlow {tf.__version__}: loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    print(f"rank {rank}: weights of {size} ranks are {'equal bit for bit' if equal else 'NOT EQUAL'}")
    hvd.shutdown()
    return 0 if equal and fell else 1


if __name__ == "__main__":
    sys.exit(main())
