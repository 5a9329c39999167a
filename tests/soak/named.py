"""Named operations for a while: any verbs, orders, names, sizes, process sets and threads, every result compared.

    mpirun -n 4 python -m tests.soak.named [--seconds 60] [--seed 1]

All ranks make the same plan of each round from the seed, and request it in an order of their own, some rounds from two
threads at once. Prints a line for each rank; ends with an error at the first wrong result.
"""

from __future__ import annotations

import argparse
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from commlib import horovod as hvd
from commlib.errors import MismatchError

Check = Callable[[], Any]
VERBS = ("allreduce",) * 5 + ("group", "allgather", "broadcast", "alltoall", "reducescatter", "barrier", "mismatch")
SIZES = (1, 5, 300, 5000, 40_000)
DTYPES = ("float32", "float64", "int32", "float16")
MOST = 120  # operations of a round


@dataclass(frozen=True)
class Step:
    """One operation, the same on all ranks."""

    number: int
    name: str
    verb: str
    size: int
    dtype: str
    process_set: hvd.ProcessSet


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    hvd.init()
    sets = [hvd.global_process_set]
    if hvd.size() > 2:
        sets += [hvd.add_process_set(range(0, hvd.size(), 2)), hvd.add_process_set(range(1, hvd.size()))]
    end = time.monotonic() + arguments.seconds
    rounds = operations = 0
    while hvd.broadcast_object(time.monotonic() < end, name="go on"):
        shared = random.Random(f"{arguments.seed} {rounds}")
        own = random.Random(f"{arguments.seed} {rounds} {hvd.rank()}")
        operations += play(plan(shared, rounds, sets), own, threads=shared.choice([1, 2]))
        rounds += 1
    print(f"\nrank {hvd.rank()}: {rounds} rounds, {operations} operations by name, ok", flush=True)


def plan(rng: random.Random, rounds: int, sets: Sequence[hvd.ProcessSet]) -> list[Step]:
    """Return the operations of one round: most names return in every round, with another size or verb."""
    steps = []
    for number in range(rng.randrange(1, MOST)):
        name = f"round {rounds}, {number}" if rng.random() < 0.3 else f"step {number}"
        steps.append(Step(number, name, rng.choice(VERBS), rng.choice(SIZES), rng.choice(DTYPES), rng.choice(sets)))
    return steps


def play(steps: list[Step], rng: random.Random, *, threads: int) -> int:
    """Request the operations of this rank and check their results, both in random order; return their number."""
    mine = [step for step in steps if step.process_set.included()]
    rng.shuffle(mine)
    checks: list[Check] = []
    failures: list[BaseException] = []

    def request(part: Sequence[Step]) -> None:
        try:
            for step in part:
                checks.append(start(step))
        except BaseException as error:
            failures.append(error)

    workers = [threading.Thread(target=request, args=(mine[number::threads],)) for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if failures:
        raise failures[0]
    rng.shuffle(checks)
    for check in checks:
        check()
    return len(checks)


def start(step: Step) -> Check:
    """Request one operation; return a function that waits for it and compares its result."""
    name, dtype = step.name, step.dtype
    ranks = step.process_set.ranks or []
    place, size = ranks.index(hvd.rank()), len(ranks)
    value = (step.number + hvd.rank()) % 7
    total = sum((step.number + rank) % 7 for rank in ranks)
    x = np.full(step.size, value, dtype)
    match step.verb:
        case "allreduce":
            work = hvd.start_allreduce([x], [np.empty_like(x)], name, op=hvd.Sum, process_set=step.process_set)
            return lambda: same(work.wait()[0], np.full(step.size, total, dtype))
        case "group":
            arrays = [np.full(count, value, "float32") for count in (1, step.size, 3)]
            work = hvd.start_allreduce(arrays, arrays, name, op=hvd.Sum, process_set=step.process_set)
            return lambda: same(np.concatenate(work.wait()), np.full(step.size + 4, total, "float32"))
        case "allgather":
            work = hvd.start_allgather([np.full((place, 2), hvd.rank(), dtype)], name, process_set=step.process_set)
            return lambda: same(work.wait()[0][:, 0], np.repeat(ranks, range(size)).astype(dtype))
        case "broadcast":
            work = hvd.start_broadcast([x], ranks[-1], name, process_set=step.process_set)
            return lambda: same(work.wait()[0], np.full(step.size, (step.number + ranks[-1]) % 7, dtype))
        case "alltoall":
            work = hvd.start_alltoall(
                np.full((2 * size, 1), hvd.rank(), dtype), None, name, process_set=step.process_set
            )
            return lambda: same(work.wait()[0][:, 0], np.repeat(ranks, 2).astype(dtype))
        case "reducescatter":
            work = hvd.start_reducescatter([np.ones((size, 2), dtype)], name, op=hvd.Sum, process_set=step.process_set)
            return lambda: same(work.wait()[0], np.full((1, 2), size, dtype))
        case "barrier":
            return hvd.start_barrier(step.process_set, name).wait
        case _:
            work = hvd.start_allreduce([np.ones(2 + place)], [np.ones(2 + place)], name, process_set=step.process_set)
            return lambda: fails(work) if size > 1 else work.wait()


def same(actual: Any, expected: Any) -> None:
    np.testing.assert_array_equal(actual, expected, strict=True)


def fails(work: Any) -> None:
    try:
        work.wait()
    except MismatchError:
        return
    raise AssertionError(f"{work}: ranks disagreed, and nobody said so")


if __name__ == "__main__":
    main()
