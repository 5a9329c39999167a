"""Keras' `fit` in stages against one process: speed-up and idle time, measured and predicted by the simulator.

    mpiexec -n 2 python benchmarks/pipeline_keras.py [--out result.json] [--rounds 9] [--schedules gpipe,1f1b]

The same model is trained by `fit` in one process, on rank 0 while the others wait, and by a pipeline of all ranks, in
turn. "dense" computes; "sleeping" sleeps for each row, forward and backward, so cores and memory do not matter. The
prediction: each rank measures its own stage, all ranks at once, and the simulator runs the schedule with these times;
the time to split the batch and to update weights is added. A round's figure is its slowest rank's mean step time; the
table shows medians over rounds.
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
from commlib.pipeline.schedule import Costs, Kind, simulate
from commlib_tensorflow import pipeline

LAYERS = 8
BATCHES = 5  # in an epoch; the first one is not timed
MODELS = (("sleeping", 32, 64), ("dense", 256, 512))
"""The kind of layers, the rows of a microbatch, and the width of the layers."""


class SleepingLayer(keras.layers.Layer):  # type: ignore[misc]  # Keras has no types
    """A layer that sleeps for each row: once in forward, twice in backward."""

    def __init__(self, seconds: float, **options: Any) -> None:
        super().__init__(**options)
        self.seconds = seconds

    def call(self, x: Any) -> Any:
        """Return x, after the sleep."""

        def late(x: Any) -> Any:
            return self._after(x, 1.0), lambda gradient: self._after(gradient, 2.0)

        return tf.custom_gradient(late)(x)

    def _after(self, x: Any, times: float) -> Any:
        def sleep(value: Any) -> Any:
            time.sleep(times * self.seconds * len(value))
            return value

        return tf.ensure_shape(tf.numpy_function(sleep, [x], x.dtype), x.shape)


def model_of(kind: str, width: int, row_seconds: float) -> Any:
    """Return a model of LAYERS identical layers, the same on every rank."""
    keras.utils.set_random_seed(0)
    layers = [keras.Input((width,))]
    for _ in range(LAYERS):
        if kind == "sleeping":
            layers.append(SleepingLayer(row_seconds / LAYERS))
        layers.append(keras.layers.Dense(width, activation="relu"))
    return keras.Sequential(layers)


class Clock(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """A clock that records the end of each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Record the time."""
        self.ends.append(time.perf_counter())


def fit(model: Any, x: Any, y: Any, rows: int) -> Callable[[], float]:
    """Return a function that trains for an epoch, and returns the mean seconds of a step after the first."""
    batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(rows)

    def run() -> float:
        clock = Clock()
        model.fit(batches, verbose=0, shuffle=False, callbacks=[clock])
        return (clock.ends[-1] - clock.ends[0]) / (len(clock.ends) - 1)

    return run


def measured(comm: Any, pipe: Any, step: Callable[[], float]) -> tuple[Costs, float]:
    """Return the cost of each stage, measured by its rank while all ranks run, and a step's time outside the schedule.

    Costs are means over the actions of a kind. The time outside the schedule splits the batch and updates weights; it
    is taken from the rank that waits least.
    """
    runner = pipe.pipe.runner
    program = pipe.pipe.lowered.schedule.programs[comm.rank]
    durations: dict[tuple[int, Kind], list[float]] = {}
    rests = []
    runner.spans = []
    for _ in range(3):
        whole = step()
        for action, (began, ended) in zip(program, runner.spans, strict=True):
            durations.setdefault((action.stage, action.kind), []).append(ended - began)
        rests.append(whole - (runner.spans[-1][1] - runner.spans[0][0]))
    runner.spans = None
    cost_of: dict[tuple[int, Kind], float] = {}
    for one in comm.all_gather_object({key: statistics.mean(values) for key, values in durations.items()}):
        cost_of |= one
    stages = range(pipe.pipe.schedule.stages)
    sends = [value for (_, kind), value in cost_of.items() if kind in (Kind.SEND_F, Kind.SEND_B)]
    costs = Costs(
        tuple(cost_of[stage, Kind.F] for stage in stages),
        tuple(0.0 for _ in stages),
        tuple(cost_of[stage, Kind.B] for stage in stages),
        send=statistics.mean(sends) if sends else 0.0,
    )
    return costs, min(comm.all_gather_object(statistics.median(rests)))


def one(comm: Any, kind: str, rows: int, width: int, name: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds of a step of both, and the predictions."""
    count = arguments.microbatches
    row_seconds = arguments.sleep_ms / 1e3 / rows
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(2, BATCHES * rows * count, width)).astype(np.float32)
    optimizer = {"optimizer": keras.optimizers.SGD(1e-3), "loss": "mse"}
    alone = model_of(kind, width, row_seconds)
    alone.compile(**optimizer, jit_compile=False)
    layers = 2 * LAYERS if kind == "sleeping" else LAYERS
    pipe = pipeline(
        model_of(kind, width, row_seconds),
        comm,
        schedule=name,
        microbatches=count,
        split=[layers // comm.size] * comm.size,
    )
    pipe.compile(optimizer=keras.optimizers.SGD(1e-3), loss="mse")
    steps = {"one process": fit(alone, x, y, rows * count), "pipeline": fit(pipe, x, y, rows * count)}
    for step in steps.values():
        step()
    seconds: dict[str, list[float]] = {who: [] for who in steps}
    for turn in range(arguments.rounds):
        for who in sorted(steps, reverse=bool(turn % 2)):
            comm.barrier()
            own = steps[who]() if who == "pipeline" or comm.rank == 0 else 0.0
            seconds[who].append(max(comm.all_gather_object(own)))
    costs, rest = measured(comm, pipe, steps["pipeline"])
    expected = simulate(pipe.pipe.lowered, costs)
    busy, predicted = sum(expected.busy) / comm.size, expected.seconds + rest
    got = statistics.median(seconds["pipeline"])
    pipe.close()
    return {
        "kind": kind, "rows": rows, "width": width, "schedule": name, "seconds": seconds,
        "predicted": predicted, "predicted_bubble": 1 - busy / predicted, "bubble": 1 - busy / got,
    }  # fmt: skip


def show(rows: list[dict[str, Any]], ranks: int) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"a step of Keras' fit, {ranks} ranks")
    for column in (
        "model",
        "schedule",
        "one process, ms",
        "pipeline, ms",
        "speed-up",
        "predicted",
        "idle",
        "predicted",
    ):
        table.add_column(column, justify="right")
    for row in rows:
        alone, staged = (statistics.median(row["seconds"][who]) for who in ("one process", "pipeline"))
        numbers = (1e3 * alone, 1e3 * staged, alone / staged, alone / row["predicted"])
        table.add_row(
            row["kind"], row["schedule"], *(f"{number:.2f}" for number in numbers), f"{row['bubble']:.3f}",
            f"{row['predicted_bubble']:.3f}",
        )  # fmt: skip
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", default="gpipe,1f1b")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--sleep-ms", type=float, default=20.0, help="of the forward of a microbatch in all layers")
    parser.add_argument("--out", type=Path, help="write raw figures as JSON")
    arguments = parser.parse_args()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    comm = commlib.init()
    facts = record.gather_program_facts(MPI.COMM_WORLD)
    rows = [one(comm, *model, name, arguments) for model in MODELS for name in arguments.schedules.split(",")]
    if comm.rank:
        return
    show(rows, comm.size)
    if arguments.out:
        record.write(arguments.out, "pipeline_keras", facts, arguments, fits=rows)


if __name__ == "__main__":
    main()
