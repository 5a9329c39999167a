"""Train with a custom loop: a tape reduces its gradients over all ranks.

    mpirun -n 2 python examples/loop_tensorflow.py

Each rank has a part of the data. The exit code is 0 if the network is accurate, and the same on all ranks.
"""

from __future__ import annotations

import os
import sys
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # before TensorFlow is imported

import keras
import numpy as np
import tensorflow as tf
from digits import load_digits

import commlib_tensorflow as ct

BATCH = 32  # per rank
STEPS = 300
MIN_ACCURACY = 0.95


def main() -> int:
    ct.init()
    images, labels = load_digits()
    order = np.random.default_rng(0).permutation(len(labels))
    images, labels = images[order].reshape(-1, 64), labels[order]
    testing = images[-360:], labels[-360:]
    mine = slice(ct.rank(), len(labels) - 360, ct.size())
    dataset = tf.data.Dataset.from_tensor_slices((images[mine], labels[mine]))
    dataset = dataset.repeat().shuffle(2000, seed=ct.rank()).batch(BATCH)

    layers = [keras.layers.Input((64,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10)]
    model = keras.Sequential(layers)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.Adam(0.002 * ct.size())
    optimizer.build(model.trainable_variables)
    ct.broadcast_variables([*model.weights, *optimizer.variables], root_rank=0)

    @tf.function  # type: ignore[untyped-decorator]  # TensorFlow has no types
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        tape = ct.DistributedGradientTape(tape)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    for number, (x, y) in enumerate(dataset.take(STEPS)):
        loss = step(x, y)
        if number % 50 == 0:
            average = float(ct.allreduce(loss, name="loss"))  # collective: on all ranks
            if ct.rank() == 0:
                print(f"step {number:4}  loss {average:.3f}", flush=True)

    right = float(np.mean(np.argmax(model(testing[0]), axis=1) == testing[1]))
    same = len(set(ct.allgather_object(b"".join(weight.tobytes() for weight in model.get_weights())))) == 1
    if ct.rank() == 0:
        print(f"test accuracy {right:.2%} (must be > {MIN_ACCURACY:.0%}), weights {'equal' if same else 'DIFFERENT'}")
    return 0 if right > MIN_ACCURACY and same else 1


if __name__ == "__main__":
    sys.exit(main())
