"""Cost of a timeline: training steps and small calls, with and without a timeline on every rank.

    mpiexec -n 2 python benchmarks/timeline.py [--out result.json] [--rounds 10] [--steps 20] [--calls 2000]

The step is that of benchmarks/data_parallel.py, with a DistributedOptimizer that overlaps; the calls are in-place
all-reduces of a few sizes. Both run in one process per rank, with a timeline and without, in rounds whose order
alternates. Wall time is the slowest rank's. Processor time is that of all threads of all ranks, which other programs on
the machine disturb less. Opening and closing a file is not timed. Wall time includes writing only while steps run;
processor time includes all of it.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mpi4py import MPI

import commlib
from benchmarks import data_parallel as training
from commlib.bench import record
from commlib_torch import DistributedOptimizer

SIZES = (4, 4096, 1 << 18, 1 << 20)  # bytes of the calls

Block = Callable[[], None]
"""Some steps, or some calls, in a row."""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=1152, help="of the hidden layers")
    parser.add_argument("--rows", type=int, default=64, help="of a batch, per rank")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--warm-up", type=int, default=2, help="rounds that are not counted")
    parser.add_argument("--steps", type=int, default=20, help="per round")
    parser.add_argument("--calls", type=int, default=2000, help="of 4 bytes, per round; of larger sizes fewer")
    parser.add_argument("--out", type=Path, help="write raw figures as JSON")
    options = parser.parse_args()
    options.keep_gradients = False
    return options


def steps_of(options: argparse.Namespace, comm: Any) -> Block:
    """Return a function that runs some training steps."""
    model = training.make_model(options.width)
    optimizer: Any = DistributedOptimizer(
        training.make_optimizer(model), model.named_parameters(), ranks=comm, overlap=True
    )
    step = training.plain_step(model, optimizer, options)
    generator = torch.Generator().manual_seed(comm.rank)
    inputs = torch.randn(options.rows, 784, generator=generator)
    labels = torch.randint(10, (options.rows,), generator=generator)

    def run() -> None:
        for _ in range(options.steps):
            step(inputs, labels)

    return run


def calls_of(nbytes: int, count: int, comm: Any) -> Block:
    """Return a function that runs some all-reduces of `nbytes` bytes."""
    x = np.ones(nbytes // 4, np.float32)

    def run() -> None:
        for _ in range(count):
            comm.all_reduce(x, "mean", out=x)

    return run


def measure(
    comm: Any, run: Block, count: int, options: argparse.Namespace, folder: Path
) -> dict[str, list[list[float]]]:
    """Return the wall and the processor seconds of one step or call of each round, without a timeline and with one."""
    samples: dict[str, list[list[float]]] = {"off": [], "on": []}
    for turn in range(options.warm_up + options.rounds):
        for name in ("off", "on") if turn % 2 else ("on", "off"):
            trace = commlib.timeline(str(folder / "trace{rank}.json")) if name == "on" else None
            comm.barrier()
            began, used = time.perf_counter(), time.process_time()
            run()
            took = time.perf_counter() - began
            if trace is not None:
                trace.stop()  # waits until everything is written
            everyone = comm.all_gather_object((took, time.process_time() - used))
            if turn >= options.warm_up:
                samples[name].append(
                    [max(wall for wall, _ in everyone) / count, sum(cpu for _, cpu in everyone) / count]
                )
    return samples


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    comm = commlib.init()
    measured: dict[str, dict[str, list[list[float]]]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(comm.broadcast_object(name))
        measured["training step"] = measure(comm, steps_of(options, comm), options.steps, options, folder)
        for nbytes in SIZES:
            count = max(50, options.calls * 4096 // max(nbytes, 4096))
            run = calls_of(nbytes, count, comm)
            measured[f"all-reduce of {nbytes} bytes"] = measure(comm, run, count, options, folder)
        comm.barrier()  # rank 0 removes the folder next
    facts = record.gather_program_facts(MPI.COMM_WORLD)
    if comm.rank == 0:
        show(measured)
        if options.out:
            record.write(options.out, "timeline", facts, options, measured=measured)
    commlib.shutdown()


def show(measured: dict[str, dict[str, list[list[float]]]]) -> None:
    """Print medians, in us, and the median of each round's ratio."""
    print(f"{'':<32}{'off, us':>12}{'on, us':>12}{'ratio':>8}{'processor':>11}")
    for name, both in measured.items():
        off, on = (statistics.median(wall for wall, _ in both[way]) * 1e6 for way in ("off", "on"))
        pairs = list(zip(both["off"], both["on"], strict=True))
        walls, cpus = (statistics.median(b[place] / a[place] for a, b in pairs) for place in range(2))
        print(f"{name:<32}{off:>12.1f}{on:>12.1f}{walls:>8.3f}{cpus:>11.3f}")


if __name__ == "__main__":
    main()
