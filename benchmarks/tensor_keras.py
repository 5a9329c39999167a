"""Sharded Keras models: the cost of a redistribution in a graph, and `fit` against one process.

    mpiexec -n 2 python benchmarks/tensor_keras.py [--out result.json] [--rounds 9]

"moves": the time per all-reduce in a traced function of many consecutive all-reduces, against the same function without
them; forward alone, and forward and backward, in which each all-reduce is paired with a copy whose gradient is reduced.
"fit": a feed-forward network of several blocks is trained by `fit`, sharded, and unsharded on rank 0 alone while the
others wait, in turn. A round's figure is its slowest rank's; the table shows medians over rounds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf
from mpi4py import MPI

import commlib
from commlib.bench import record
from commlib.tensor_parallel import Column, Row
from commlib_tensorflow.tensor import copy, parallelize, reduce

MOVES = 32  # in one function
BLOCKS = 4
BATCHES = 6  # in an epoch; the first one is not timed
SIZES = ((16, 256), (256, 512), (512, 1024))
"""Rows of a batch, and the width of the blocks."""

Run = Callable[[], float]


def chain(comm: Any, count: int, *, backward: bool) -> Callable[[Any], Any]:
    """Return a traced function of `count` all-reduces, each of the previous result."""

    def forward(x: Any) -> Any:
        for _ in range(count):
            x = tf.tanh(x) * 0.5
            x = reduce(copy(x, comm) if backward else x, comm)
        for _ in range(MOVES - count):
            x = tf.tanh(x) * 0.5
        return x

    def function(x: Any) -> Any:
        if not backward:
            return forward(x)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = forward(x)
        return tape.gradient(y, x)

    return tf.function(function, autograph=False)  # type: ignore[no-any-return]


def moves(comm: Any, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for elements in (1, 4096, 262144):
        x = tf.ones((elements,), tf.float32)
        for backward in (False, True):
            functions = {"moves": chain(comm, MOVES, backward=backward), "nothing": chain(comm, 0, backward=backward)}
            runs = {name: _timed(function, x) for name, function in functions.items()}
            seconds = in_turn(comm, runs, arguments.rounds)
            count = MOVES * (1 + backward)
            rows.append({"nbytes": 4 * elements, "backward": backward, "count": count, "seconds": seconds})
    return rows


def _timed(function: Callable[[Any], Any], x: Any) -> Run:
    def run() -> float:
        began = time.perf_counter()
        for _ in range(5):
            function(x)
        return (time.perf_counter() - began) / 5

    return run


def model_of(width: int) -> Any:
    """Return a model of feed-forward blocks with residuals, the same on every rank."""
    keras.utils.set_random_seed(0)
    x = inputs = keras.Input((width,))
    for block in range(BLOCKS):
        h = keras.layers.LayerNormalization()(x)
        h = keras.layers.Dense(4 * width, activation="gelu", name=f"up_{block}")(h)
        x = keras.layers.Add()([x, keras.layers.Dense(width, name=f"down_{block}")(h)])
    return keras.Model(inputs, x)


class Clock(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """A clock that records the end of each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Record the time."""
        self.ends.append(time.perf_counter())


def fit(model: Any, rows: int, width: int) -> Run:
    """Return a function that trains for an epoch, and returns the mean seconds of a step after the first."""
    x, y = np.random.default_rng(0).normal(size=(2, BATCHES * rows, width)).astype(np.float32)
    model.compile(keras.optimizers.SGD(1e-3), "mse", jit_compile=False)

    def run() -> float:
        clock = Clock()
        model.fit(x, y, batch_size=rows, verbose=0, shuffle=False, callbacks=[clock])
        return (clock.ends[-1] - clock.ends[0]) / (len(clock.ends) - 1)

    return run


def fits(comm: Any, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    results = []
    for rows, width in SIZES:
        divided = parallelize(model_of(width), comm, {"up_*": Column(), "down_*": Row()})
        runs = {"divided": fit(divided, rows, width), "one process": fit(model_of(width), rows, width)}
        results.append({"rows": rows, "width": width, "seconds": in_turn(comm, runs, arguments.rounds)})
    return results


def in_turn(comm: Any, runs: dict[str, Run], rounds: int) -> dict[str, list[float]]:
    """Return the slowest rank's seconds, per contender and round; "one process" is rank 0's."""
    names = list(runs)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds + 1):
        for place in range(len(names)):
            name = names[(place + turn) % len(names)]
            comm.barrier()
            elapsed = runs[name]() if name != "one process" or comm.rank == 0 else 0.0
            slowest = max(comm.all_gather_object(elapsed))
            if turn:
                seconds[name].append(slowest)
    return seconds


def per_move(row: dict[str, Any]) -> list[float]:
    """Return the seconds of one all-reduce in each round."""
    pairs = zip(row["seconds"]["moves"], row["seconds"]["nothing"], strict=True)
    return [(moved - nothing) / row["count"] for moved, nothing in pairs]


def show(measured: dict[str, list[dict[str, Any]]], ranks: int) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=120)
    one = Table(title=f"redistributions in a graph, {ranks} ranks")
    for column in ("bytes", "", "us per all-reduce"):
        one.add_column(column, justify="right")
    for row in measured["moves"]:
        what = "forward and backward" if row["backward"] else "forward"
        one.add_row(str(row["nbytes"]), what, f"{1e6 * statistics.median(per_move(row)):.1f}")
    console.print(one)
    two = Table(title=f"fit, {ranks} ranks")
    for column in ("rows", "width", "sharded, ms", "one process, ms", "speed-up"):
        two.add_column(column, justify="right")
    for row in measured["fits"]:
        mine, alone = row["seconds"]["divided"], row["seconds"]["one process"]
        gain = statistics.median(b / a for a, b in zip(mine, alone, strict=True))
        cells = [f"{1e3 * statistics.median(values):.1f}" for values in (mine, alone)]
        two.add_row(str(row["rows"]), str(row["width"]), *cells, f"{gain:.2f}")
    console.print(two)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, help="write raw figures as JSON")
    arguments = parser.parse_args()
    tf.config.threading.set_intra_op_parallelism_threads(1)  # a core for each rank, and for one process as well
    tf.config.threading.set_inter_op_parallelism_threads(1)
    comm = commlib.init()
    facts = record.gather_program_facts(MPI.COMM_WORLD)
    measured = {"moves": moves(comm, arguments), "fits": fits(comm, arguments)}
    if comm.rank:
        return
    show(measured, comm.size)
    if arguments.out:
        record.write(arguments.out, "tensor_keras", facts, arguments, **measured)


if __name__ == "__main__":
    main()
