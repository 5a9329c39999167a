"""Named operations, submitted in another order on every rank, against MPI_Allreduce in the same order on all.

    mpirun -n 2 python benchmarks/named.py [--tensors 1000] [--bytes 4096] [--rounds 15] [--out FILE.json]

Contenders reduce the same float32 arrays in place, in turn, in rounds; times are those of the slowest rank, medians
over rounds. "named" submits all of them by name, each rank in a different random order, then waits for each. "grouped"
submits all under one name. "one by one" submits and waits, in order: the coordinator's cost without fusion. "in order"
is commlib without names. The first cycle, which sends the names as text, is reported separately.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from commlib import horovod as hvd
from commlib.bench import record


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tensors", type=int, default=1000)
    parser.add_argument("--bytes", type=int, default=4096, help="of each tensor")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, help="write raw figures to this JSON file")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    comm = hvd.init()
    world = MPI.COMM_WORLD
    facts = record.gather_program_facts(world)
    arrays = [np.zeros(arguments.bytes // 4, np.float32) for _ in range(arguments.tensors)]
    names = [f"tensor {number}" for number in range(arguments.tensors)]
    order = list(range(arguments.tensors))
    shuffle = random.Random(world.rank).shuffle
    submit_seconds: list[float] = []

    def named() -> None:
        start = time.perf_counter()
        works = [hvd.start_allreduce([arrays[n]], [arrays[n]], names[n], op=hvd.Sum) for n in order]
        submit_seconds.append(time.perf_counter() - start)
        for work in works:
            work.wait()

    def grouped() -> None:
        hvd.start_allreduce(arrays, arrays, "group", op=hvd.Sum, blocking=True).wait()

    def one_by_one() -> None:
        for array, name in zip(arrays, names, strict=True):
            hvd.start_allreduce([array], [array], name, op=hvd.Sum, blocking=True).wait()

    def in_order() -> None:
        for array in arrays:
            comm.all_reduce(array, out=array)

    def mpi() -> None:
        for array in arrays:
            world.Allreduce(MPI.IN_PLACE, array)

    contenders: dict[str, Callable[[], Any]] = {
        "named": named, "grouped": grouped, "one by one": one_by_one, "in order": in_order, "MPI_Allreduce": mpi,
    }  # fmt: skip
    shuffle(order)
    first = slowest(world, named)
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    wrong = 0
    for number in range(arguments.rounds + 2):
        shuffle(order)
        for name, call in contenders.items():
            for value, array in enumerate(arrays):
                array[...] = value % 7 + world.rank
            took = slowest(world, call)
            total = world.size * (world.size - 1) // 2
            wrong += sum(bool((a != world.size * (value % 7) + total).any()) for value, a in enumerate(arrays))
            if number >= 2:
                seconds[name].append(took)
    wrong = world.allreduce(wrong)
    if world.rank == 0:
        peer = statistics.median(seconds["MPI_Allreduce"])
        print(f"{arguments.tensors} tensors of {arguments.bytes} bytes, {world.size} ranks, {arguments.rounds} rounds")
        print(f"{'':<15}{'ms':>9}{'us each':>9}{'least-greatest ms':>20}{'of MPI':>8}")
        for name, times in seconds.items():
            middle = statistics.median(times)
            spread = f"{1e3 * min(times):.1f}-{1e3 * max(times):.1f}"
            each = 1e6 * middle / arguments.tensors
            print(f"{name:<15}{1e3 * middle:>9.2f}{each:>9.2f}{spread:>20}{middle / peer:>8.2f}")
        submit = 1e6 * statistics.median(submit_seconds) / arguments.tensors
        print(f"submitting one takes {submit:.2f} us; the first cycle took {1e3 * first:.1f} ms in total")
        if arguments.out:
            measured = {"asking": submit_seconds, "first": first, "seconds": seconds}
            record.write(arguments.out, "named", facts, arguments, wrong=wrong, **measured)
    if wrong:
        raise SystemExit(f"{wrong} wrong results")


def slowest(world: Any, call: Callable[[], Any]) -> float:
    """Return the seconds of a call on the slowest rank."""
    world.Barrier()
    start = time.perf_counter()
    call()
    return float(world.allreduce(time.perf_counter() - start, MPI.MAX))


if __name__ == "__main__":
    main()
