"""Time of a step of Keras' `fit` with a DistributedOptimizer, against the same without communication.

    mpiexec -n 2 python benchmarks/keras_fit.py [--out result.json] [--rounds 20] [--steps 20] [--width 1024]

A multilayer perceptron 784-width x layers-10, by default of 4 million parameters, is trained by SGD on random data, by
default 64 rows and one thread per rank. The contenders alternate inside one process per rank, each with a separate
model, in rounds whose order rotates, so they run under the same conditions. With --legacy all use tf_keras instead of
Keras 3, and TensorFlow's own MultiWorkerMirroredStrategy, which Keras 3 cannot use, is one of them. A round's figure is
its slowest rank's mean time from the end of one batch to the end of the next; the table shows median and spread over
rounds, and the median over rounds of the ratio to no communication.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import socket
import statistics
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # before TensorFlow is imported

import numpy as np
import tensorflow as tf
from mpi4py import MPI

import commlib
import commlib_tensorflow.keras as hvd
from commlib.bench import record

REFERENCE = "no communication"


def compiled(arguments: argparse.Namespace, *, distributed: bool, **settings: Any) -> Any:
    """Return a compiled MLP, the same on every rank."""
    keras = arguments.keras
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(arguments.width, activation="relu") for _ in range(arguments.layers)]
    model = keras.Sequential([keras.layers.Input((784,)), *layers, keras.layers.Dense(10)])
    optimizer = keras.optimizers.SGD(0.01, momentum=arguments.momentum)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(hvd.DistributedOptimizer(optimizer, **settings) if distributed else optimizer, loss)
    return model


def multi_worker() -> Any:
    """Return TensorFlow's own data-parallel strategy over the same ranks, by gRPC on this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    workers = commlib.world().all_gather_object(address)
    task = {"type": "worker", "index": hvd.rank()}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": task})
    return tf.distribute.MultiWorkerMirroredStrategy()


def measure(models: dict[str, Any], arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Return the seconds per step of every contender in every round."""
    generator = np.random.default_rng(hvd.rank())
    inputs = generator.normal(size=(arguments.rows, 784)).astype(np.float32)
    labels = generator.integers(10, size=arguments.rows)
    data = tf.data.Dataset.from_tensors((inputs, labels)).repeat()
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    data = data.with_options(options)
    names, ends = list(models), list[float]()
    clock = arguments.keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda *_, **__: ends.append(time.perf_counter())
    )
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(arguments.warm_up + arguments.rounds):
        for position in range(len(names)):
            name = names[(position + turn) % len(names)]
            commlib.world().barrier()
            ends.clear()
            models[name].fit(
                data, epochs=1, steps_per_epoch=arguments.steps + 1, shuffle=False, verbose=0, callbacks=[clock]
            )
            mine = (ends[-1] - ends[0]) / arguments.steps
            slowest = max(commlib.world().all_gather_object(mine))
            if turn >= arguments.warm_up:
                seconds[name].append(slowest)
    return seconds


def show(seconds: dict[str, list[float]], title: str) -> None:
    print(f"{title}\n{'contender':20} {'median ms':>10} {'10% ms':>8} {'90% ms':>8} {'ratio':>7}   spread of ratio")
    for name, values in seconds.items():
        ratios = [value / base for value, base in zip(values, seconds[REFERENCE], strict=True)]
        cells = [1e3 * quantile(values, share) for share in (0.1, 0.9)]
        spread = f"{quantile(ratios, 0.1):.2f} to {quantile(ratios, 0.9):.2f}"
        print(
            f"{name:20} {1e3 * statistics.median(values):10.2f} {cells[0]:8.2f} {cells[1]:8.2f} "
            f"{statistics.median(ratios):7.3f}   {spread}"
        )


def quantile(values: list[float], fraction: float) -> float:
    return sorted(values)[round(fraction * (len(values) - 1))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=1024, help="of the hidden layers")
    parser.add_argument("--layers", type=int, default=4, help="how many hidden layers")
    parser.add_argument("--momentum", type=float, default=0.0)
    parser.add_argument("--legacy", action="store_true", help="use tf_keras; measure MultiWorkerMirroredStrategy too")
    parser.add_argument("--rows", type=int, default=64, help="of a batch, per rank")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--warm-up", type=int, default=2, help="rounds that are not counted")
    parser.add_argument("--steps", type=int, default=20, help="per round and contender")
    parser.add_argument("--threads", type=int, default=1, help="of TensorFlow within an operation, per rank")
    parser.add_argument("--out", type=Path, help="write raw figures as JSON")
    arguments = parser.parse_args()

    tf.config.threading.set_intra_op_parallelism_threads(arguments.threads)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    hvd.init()
    facts = record.gather_program_facts(MPI.COMM_WORLD)
    strategy = multi_worker() if arguments.legacy else None  # must be created before any other TensorFlow object
    arguments.keras = importlib.import_module("tf_keras" if arguments.legacy else "keras")
    models = {
        REFERENCE: compiled(arguments, distributed=False),
        "ours": compiled(arguments, distributed=True),
        "ours, bfloat16": compiled(arguments, distributed=True, compression=hvd.Compression.bf16),
    }
    if strategy is not None:
        with strategy.scope():
            models["MultiWorkerMirrored"] = compiled(arguments, distributed=False)
    seconds = measure(models, arguments)
    if hvd.rank() == 0:
        show(
            seconds, f"{hvd.size()} ranks, {models['ours'].count_params()} parameters, {arguments.threads} thread each"
        )
        if arguments.out:
            arguments.keras = arguments.keras.__name__
            count = models["ours"].count_params()
            record.write(arguments.out, "keras_fit", facts, arguments, parameters=count, seconds=seconds)


if __name__ == "__main__":
    main()
