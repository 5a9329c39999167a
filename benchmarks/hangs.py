"""Cost of hang diagnosis in a job that does not hang.

    mpiexec -n 2 python benchmarks/hangs.py [--out result.json] [--rounds 40] [--calls 5000] [--steps 5] [--width 1152]

Each call records its text (`commlib.observe.flight_recorder`), and a thread checks periodically for hangs. "Without"
has neither: the same methods without the recording lines, and no thread. With and without alternate in one process, in
rounds whose order alternates, on a 4-byte all-reduce in symmetric memory, in ordinary memory, as a plan, and in a
data-parallel step of PyTorch (the MLP of `data_parallel.py`). A figure is the median over rounds of the ratio of the
slowest rank's times. If there are fewer cores than ranks, start one rank: recording costs the same nanoseconds, and
there is no other rank to wait for.
"""

from __future__ import annotations

import argparse
import inspect
import statistics
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from torch import nn

import commlib
from benchmarks.data_parallel import make_model, make_optimizer
from commlib.bench import record
from commlib.runtime import compiled_call
from commlib.runtime.hang_watch import Answers, watch_for_hangs
from commlib_torch import DistributedOptimizer

_NOTING = ((compiled_call.CompiledCall, "now"), (compiled_call.CompiledCall, "start"), (compiled_call.Plan, "__call__"))


def without_note(method: Any) -> Any:
    """Return a method without the line that records the call."""
    lines = textwrap.dedent(inspect.getsource(method)).splitlines()
    rest = [line for line in lines if "self._note(" not in line]
    if len(rest) == len(lines):
        raise SystemExit(f"{method.__qualname__} has no line with self._note(: there is nothing to measure")
    space: dict[str, Any] = {}
    exec("\n".join(rest), vars(compiled_call), space)
    return space[method.__name__]


class HangExplanation:
    """A switch for both parts of hang diagnosis: the recording of calls, and the thread."""

    def __init__(self, comm: Any, after: float) -> None:
        self._comm, self._after = comm, after
        on = [(kind, name, vars(kind)[name]) for kind, name in _NOTING]
        self._methods = {True: on, False: [(kind, name, without_note(method)) for kind, name, method in on]}
        self._answers = comm.all_gather_object(Answers.of(comm.config))

    def turn(self, on: bool) -> None:
        """Turn hang diagnosis on or off."""
        for kind, name, method in self._methods[on]:
            setattr(kind, name, method)
        runtime = self._comm.runtime
        if runtime.hang_watch is not None:
            runtime.hang_watch.close()
            runtime.hang_watch = None
        if on:
            watch_for_hangs(runtime, self._comm.rank, self._answers)


def measure(explaining: HangExplanation, burst: Callable[[], None], calls: int, rounds: int) -> dict[str, float]:
    """Return medians over rounds: seconds of a call with and without, and the ratio."""
    times: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(rounds + 1):
        for on in (True, False) if turn % 2 else (False, True):
            explaining.turn(on)
            MPI.COMM_WORLD.Barrier()
            began = time.perf_counter()
            burst()
            seconds = MPI.COMM_WORLD.allreduce((time.perf_counter() - began) / calls, MPI.MAX)
            if turn:  # the first one warms up
                times[on].append(seconds)
    ratios = [with_ / without for with_, without in zip(times[True], times[False], strict=True)]
    quarters = statistics.quantiles(ratios, n=4)
    return {
        "with": statistics.median(times[True]),
        "without": statistics.median(times[False]),
        "ratio": statistics.median(ratios),
        "least_difference": min(times[True]) - min(times[False]),
        "lower_quartile": quarters[0],
        "upper_quartile": quarters[2],
    }


def steps_of(arguments: argparse.Namespace, rank: int) -> Callable[[], None]:
    """Return a function that runs some data-parallel steps."""
    torch.set_num_threads(1)
    model = make_model(arguments.width)
    optimizer = DistributedOptimizer(make_optimizer(model), model.named_parameters())
    generator = torch.Generator().manual_seed(rank)
    inputs = torch.randn(64, 784, generator=generator)
    labels = torch.randint(10, (64,), generator=generator)

    def burst() -> None:
        for _ in range(arguments.steps):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()

    return burst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--calls", type=int, default=5000)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--width", type=int, default=1152)
    arguments = parser.parse_args()
    comm = commlib.init()
    facts = record.gather_program_facts(MPI.COMM_WORLD)
    explaining = HangExplanation(comm, comm.config.hang_after)
    symmetric, ordinary = comm.empty(1), np.ones(1, "float32")
    plan, all_reduce = comm.plan_all_reduce(symmetric, out=symmetric), comm.all_reduce

    def in_symmetric() -> None:
        for _ in range(arguments.calls):
            all_reduce(symmetric, out=symmetric)

    def in_ordinary() -> None:
        for _ in range(arguments.calls):
            all_reduce(ordinary, out=ordinary)

    def as_plan() -> None:
        for _ in range(arguments.calls):
            plan()

    cases = {
        "4 bytes, symmetric": (in_symmetric, arguments.calls),
        "4 bytes, ordinary": (in_ordinary, arguments.calls),
        "4 bytes, plan": (as_plan, arguments.calls),
        "data-parallel step": (steps_of(arguments, comm.rank), arguments.steps),
    }
    measured = {}
    for name, (burst, calls) in cases.items():
        result = measured[name] = measure(explaining, burst, calls, arguments.rounds)
        if comm.rank == 0:
            low, high = result["lower_quartile"], result["upper_quartile"]
            us = f"{result['with'] * 1e6:10.3f} us with {result['without'] * 1e6:10.3f} us without"
            ratio = f"ratio {result['ratio']:.4f} (quartiles {low:.4f} to {high:.4f})"
            print(f"{name:20} {us}  {ratio}  best rounds {result['least_difference'] * 1e9:+.0f} ns", flush=True)
    explaining.turn(True)
    if comm.rank == 0 and arguments.out:
        record.write(arguments.out, "hangs", facts, arguments, measured=measured)


if __name__ == "__main__":
    main()
