"""Times that can be compared: contenders in turn inside one process, in bursts, of the slowest rank.

A burst is as many calls as take about 30 ms, or as many as were asked for; its figure is the mean of one call, on the
rank where that is greatest.
What is reported is the median over rounds, in each of which every contender has one burst, so that a slow spell of the
machine hits all of them. All ranks have the same numbers, because each is the greatest of all ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

from commlib.bench.cases import Case

Call = Callable[[], Any]
Burst = Callable[[], float]  # runs one burst and returns its figure, in seconds
BURST_SECONDS, TOO_LONG, FEWEST, MOST = 0.03, 10, 2, 2000


def settle(call: Call, calls: int, warm_up: int | None = None) -> None:
    """Run half a burst, or `warm_up` calls, that do not count.

    A contender that sleeps in its waits, as gloo does, may leave both ranks on one core; the kernel takes milliseconds
    to part them, which would be charged to whoever comes next.
    """
    for _ in range(calls // 2 if warm_up is None else warm_up):
        call()


def run_burst(world: Any, call: Call, calls: int, warm_up: int | None = None) -> float:
    """Return the seconds per call of the slowest rank."""
    settle(call, calls, warm_up)
    world.Barrier()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return float(world.allreduce((time.perf_counter() - start) / calls, MPI.MAX))


def run_fresh_burst(world: Any, call: Call, calls: int, rewrite: Call, warm_up: int | None = None) -> float:
    """Return the same of calls on data that this rank has just written."""
    spent = 0.0
    settle(call, calls, warm_up)
    for _ in range(calls):
        rewrite()
        world.Barrier()
        start = time.perf_counter()
        call()
        spent += time.perf_counter() - start
    return float(world.allreduce(spent / calls, MPI.MAX))


def run_single_calls(
    world: Any, call: Call, calls: int, single: list[float], rewrite: Call | None = None, warm_up: int | None = None
) -> float:
    """Add the seconds of each call, of the rank on which it took longest, to `single`; return their mean."""
    settle(call, calls, warm_up)
    times = np.empty(calls)
    world.Barrier()
    for index in range(calls):
        if rewrite is not None:
            rewrite()
            world.Barrier()
        start = time.perf_counter()
        call()
        times[index] = time.perf_counter() - start
    slowest = np.empty_like(times)
    world.Allreduce(times, slowest, MPI.MAX)
    single += slowest.tolist()
    return float(slowest.mean())


def burst_of(
    world: Any,
    call: Call,
    rewrite: Call | None = None,
    *,
    iters: int | None = None,
    warm_up: int | None = None,
    single: list[float] | None = None,
) -> Burst:
    """Return the bursts of a contender, of `iters` calls each, or as long as a first estimate demands.

    rewrite: run before each call. warm_up: so many calls before each burst, else half as many as count. single: takes
    the time of each call.
    """
    run: Callable[..., float] = run_burst if rewrite is None else partial(run_fresh_burst, rewrite=rewrite)
    if single is not None:
        run = partial(run_single_calls, single=single, rewrite=rewrite)
    if warm_up is not None:
        run = partial(run, warm_up=warm_up)
    if iters is not None:
        return lambda: run(world, call, iters)
    calls = _burst_length(run_burst(world, call, FEWEST))

    def burst() -> float:
        nonlocal calls
        seconds = run(world, call, calls)
        if seconds * calls > TOO_LONG * BURST_SECONDS:  # the estimate was wrong: other ranks want these cores
            calls = _burst_length(seconds)
        return seconds

    return burst


def _burst_length(seconds: float) -> int:
    """Return how many calls of `seconds` make a burst."""
    return max(FEWEST, min(MOST, int(BURST_SECONDS / max(seconds, 1e-7))))


def rounds(bursts: Mapping[str, Burst], number: int) -> Iterator[dict[str, float]]:
    """Yield round after round each contender's figure."""
    for _ in range(number):
        yield {name: burst() for name, burst in bursts.items()}


def memory_pass(read: int, written: int, replaces: bool) -> Call:
    """Return what reads and writes so many private bytes, each once, front to back, by numpy's fastest operations.

    replaces: write where was read, an update in place; else a copy to other memory. What is read beyond what is
    written is merely looked through; what is written beyond what is read is the same data again.
    """
    source = np.ones(max(1, read // 8), np.uint64)
    target = source[: written // 8] if replaces else np.ones(max(1, written // 8), np.uint64)
    rest = source[len(target) :]
    pieces = [target[start : start + len(source)] for start in range(0, len(target), len(source))]
    copies = [(piece, source[: len(piece)]) for piece in pieces]

    def run() -> None:
        if replaces:
            np.invert(target, out=target)
        else:
            for to, of in copies:
                np.copyto(to, of)
        if len(rest):
            rest.max()

    return run


def wrong_elements(world: Any, case: Case, call: Call) -> int:
    """Return how many elements of the result of one call are wrong, over all ranks. It leaves the data as it is."""
    case.fill()
    world.Barrier()  # a contender that writes to its peers must not be overwritten by what they still fill in
    call()
    return int(world.allreduce(case.wrong()))
