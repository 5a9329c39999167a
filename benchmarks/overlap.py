"""Compare training steps with and without overlap of backward and reductions, on a slow network.

    source ci/env.sh
    python benchmarks/overlap.py [--framework torch] [--hosts 2] [--rate 1gbit] [--rows 256]   # as root

Starts one job on emulated hosts (ci/hosts.py), one rank on each. The models are those of
benchmarks/data_parallel.py and benchmarks/keras_fit.py, 4 million parameters, and the contenders alternate in the same
manner. In PyTorch, torch's DistributedDataParallel on gloo, which overlaps, is one of them. Further columns show the
exposed and the hidden communication time per step, from the reports of rank 0.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.launching import run
from commlib.bench import record

REFERENCE = "no communication"
OURS = {"no overlap": False, "overlap": True}
Measured = tuple[dict[str, list[float]], dict[str, Any]]
"""Seconds per step of each contender in each round, and the statistics of those that have some."""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--framework", choices=["torch", "tensorflow"], default="torch")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--rate", default="1gbit", help="of every link, as tc writes it (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=256, help="of a batch, per rank (default: %(default)s)")
    parser.add_argument("--width", type=int, default=1024, help="of the hidden layers (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--warm-up", type=int, default=2, help="rounds that are not counted")
    parser.add_argument("--steps", type=int, default=5, help="per round and contender")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for the job (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="write raw figures to this JSON file")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)  # a rank of the job
    options = parser.parse_args()
    options.ranks_per_host = 1
    return options


def in_torch(options: argparse.Namespace) -> Measured:
    import torch
    from mpi4py import MPI

    import commlib
    from benchmarks import data_parallel as training
    from commlib.bench import gloo_peer

    torch.set_num_threads(1)
    comm = commlib.init()
    options.keep_gradients = False

    def make() -> Any:
        return training.make_model(options.width)

    with gloo_peer.join_gloo(MPI.COMM_WORLD.Dup(), one_node=options.hosts == 1):
        ours = {name: training.with_optimizer(comm, make(), options, overlap=on) for name, on in OURS.items()}
        steps = {
            REFERENCE: training.without_communication(comm, make(), options),
            **{name: step for name, (step, _) in ours.items()},
            "torch DDP, gloo": training.ddp_gloo(comm, make(), options),
            "... with 4 MiB buckets": training.ddp_gloo(comm, make(), options, bucket_cap_mb=4),
        }
        seconds = training.measure(comm, steps, options)
    return seconds, {name: optimizer.statistics for name, (_, optimizer) in ours.items()}


def in_tensorflow(options: argparse.Namespace) -> Measured:
    import keras
    import tensorflow as tf

    import commlib_tensorflow.keras as hvd
    from benchmarks import keras_fit as training

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    hvd.init()
    options.keras, options.layers, options.momentum = keras, 4, 0.0
    models = {REFERENCE: training.compiled(options, distributed=False)}
    for name, on in OURS.items():
        models[name] = training.compiled(options, distributed=True, name=name, overlap=on)
    seconds = training.measure(models, options)
    return seconds, {name: models[name].optimizer.statistics for name in OURS}


def show(seconds: dict[str, list[float]], statistics_of: dict[str, Any]) -> None:
    print(f"{'contender':<24}{'step ms':>10}{'ratio':>8}{'exposed':>10}{'hidden':>10}")
    reference = statistics.median(seconds[REFERENCE])
    for name, values in seconds.items():
        step = statistics.median(values)
        cells = f"{step * 1e3:>10.1f}{step / reference:>8.3f}"
        if (totals := statistics_of.get(name)) is not None:
            for total in (totals.exposed_seconds, totals.hidden_seconds):
                cells += f"{total / totals.reductions * 1e3:>10.1f}"
        print(f"{name:<24}{cells}")


def work(options: argparse.Namespace) -> int:
    """Run one rank of the job."""
    from mpi4py import MPI

    import commlib

    seconds, statistics_of = in_torch(options) if options.framework == "torch" else in_tensorflow(options)
    facts = record.gather_program_facts(MPI.COMM_WORLD, starts_itself=True)
    if commlib.world().rank == 0:
        print(f"{options.framework}, {options.hosts} hosts, {options.rate}, {options.rows} rows per rank, ms a step")
        show(seconds, statistics_of)
        if options.out:
            reports = {name: asdict(totals) for name, totals in statistics_of.items()}
            options.keras = None  # a module in TensorFlow
            record.write(options.out, "overlap", facts, options, seconds=seconds, statistics=reports)
    return 0


if __name__ == "__main__":
    sys.exit(run(__file__, parse(), work))
