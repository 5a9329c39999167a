"""Train a small convolutional network on handwritten digits, data-parallel, and compare with one process.

    mpirun -n 2 python examples/digits_tensorflow.py

Every rank trains on its share of each batch in `model.fit`. Afterwards every rank trains the same network again, alone,
on full batches. The weights of both runs must be equal within rounding, because the order of summation differs.
"""

from __future__ import annotations

import os
import sys
import textwrap
import time
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # before TensorFlow is imported

import keras
import numpy as np
import tensorflow as tf
from digits import explain_slowdown, find_load, load_digits

import commlib_tensorflow.keras as ct

BATCH = 96  # of all ranks together; 1, 2, 3, 4, 6 and 8 ranks can share it equally
EPOCHS = 16
TEST = 360  # images kept for the end
MIN_ACCURACY = 0.97
MAX_DIFFERENCE = 1e-5  # relative, float32
Data = tuple[Any, Any]


def network() -> Any:
    # Tanh and average pooling on purpose: rounding differences stay near 1e-6 over all steps. With ReLU or GELU, or
    # with max-pooling, they may grow to several per cent: equally good networks, but not equal ones.
    layers = keras.layers
    return keras.Sequential([
        layers.Input((8, 8, 1)),
        layers.Conv2D(16, 3, padding="same", activation="tanh"),
        layers.Conv2D(32, 3, padding="same", activation="tanh"), layers.AveragePooling2D(2),
        layers.Flatten(), layers.Dense(64, activation="tanh"), layers.Dense(10),
    ])  # fmt: skip


def sgd() -> Any:
    return keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True, weight_decay=1e-4)


def compiled(model: Any, optimizer: Any) -> Any:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"], steps_per_execution=7)
    return model


def digits() -> Data:
    """Return 1797 images [n, 8, 8, 1] of values in [0, 1] and their labels [n], shuffled."""
    images, labels = load_digits()
    order = np.random.default_rng(0).permutation(len(labels))
    return images[order, :, :, None], labels[order]


def batches(images: Any, labels: Any, *, rank: int, size: int) -> Any:
    """Return share `rank` of `size` of every full batch, in the same order on every rank."""
    generator = np.random.default_rng(1)
    steps = len(labels) // BATCH
    epochs = [generator.permutation(len(labels))[: steps * BATCH].reshape(steps, BATCH) for _ in range(EPOCHS)]
    shares = np.array_split(np.concatenate(epochs), size, axis=1)[rank]
    images, labels = tf.constant(images), tf.constant(labels)
    return tf.data.Dataset.from_tensor_slices(shares).map(
        lambda rows: (tf.gather(images, rows), tf.gather(labels, rows))
    )


def train(model: Any, data: Data, *, rank: int, size: int, callbacks: Any = ()) -> float:
    """Train on share `rank` of `size` of each batch and return the seconds it took."""
    start = time.perf_counter()
    dataset, steps = batches(*data, rank=rank, size=size), len(data[1]) // BATCH
    verbose = 2 if ct.rank() == 0 and size > 1 else 0
    model.fit(dataset, epochs=EPOCHS, steps_per_epoch=steps, callbacks=list(callbacks), shuffle=False, verbose=verbose)
    return time.perf_counter() - start


def largest_difference(model: Any, reference: Any) -> float:
    """Return the largest max |a - b| / max |b| of all weights a of the model and b of the reference."""
    pairs = zip(model.get_weights(), reference.get_weights(), strict=True)
    return max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs)


def main() -> int:
    ct.init()
    if BATCH % ct.size():
        sys.exit(f"{ct.size()} ranks cannot share a batch of {BATCH} equally")
    images, labels = digits()
    training, testing = (images[:-TEST], labels[:-TEST]), (images[-TEST:], labels[-TEST:])

    keras.utils.set_random_seed(ct.rank())  # different weights on each rank, until training begins
    model = network()
    alone = compiled(keras.models.clone_model(model), sgd())
    alone.set_weights(ct.broadcast_object(model.get_weights(), root_rank=0))

    compiled(model, ct.DistributedOptimizer(sgd()))
    callbacks = [ct.callbacks.BroadcastGlobalVariablesCallback(0), ct.callbacks.MetricAverageCallback()]
    total = train(model, training, rank=ct.rank(), size=ct.size(), callbacks=callbacks)
    total_alone = train(alone, training, rank=0, size=1)

    right, difference = model.evaluate(*testing, verbose=0)[1], largest_difference(model, alone)
    passed = right > MIN_ACCURACY and difference < MAX_DIFFERENCE
    if ct.rank() == 0:
        print(f"test accuracy        {right:8.2%}    (must be > {MIN_ACCURACY:.0%})")
        print(f"total                {total:8.2f} s")
        print(f"one process alone    {total_alone:8.2f} s  (all ranks at once, each on full batches)")
        print(f"largest difference   {difference:8.1e}    (of the weights, relative; must be < {MAX_DIFFERENCE:.0e})")
        load, cores = find_load()
        if reason := explain_slowdown(ct.size(), total, total_alone, load=load, cores=cores):
            print(textwrap.fill(reason, 100))
        print("equal" if passed else "FAILED")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
