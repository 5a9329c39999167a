"""Comparable times: contenders in turn inside one process, in bursts, on the slowest rank.

A burst is as many calls as fit in about 30 ms, or the requested number; its figure is the mean of one call, on the
slowest rank.
The result is the median over rounds. Every contender runs one burst in each round, so that a slow spell of the machine
hits all of them; every second round is in the opposite order, so that none profits from the one before it. All ranks
have the same figures, because each is the maximum over all ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Protocol

import numpy as np
from mpi4py import MPI

Call = Callable[[], Any]
Burst = Callable[[], float]  # runs one burst and returns its figure, in seconds
BURST_SECONDS, TOO_LONG, FEWEST, MOST = 0.03, 10, 2, 2000


class Timer(Protocol):
    """A clock for a burst of calls."""

    def finish(self) -> None:
        """Wait for work that earlier calls have queued."""
        ...

    def seconds(self, call: Call, calls: int) -> float:
        """Make the calls, wait for the work that they queue, and return the mean seconds of a call."""
        ...


class HostTimer:
    """The host's clock, for calls that queue nothing."""

    def finish(self) -> None:
        pass

    def seconds(self, call: Call, calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - start) / calls


HOST_TIMER = HostTimer()


def settle(call: Call, calls: int, warm_up: int | None = None) -> None:
    """Run half a burst, or `warm_up` calls, without timing them.

    A contender that sleeps while it waits, as gloo does, may leave both ranks on one core; the kernel takes
    milliseconds to separate them, which would count against the next contender.
    """
    for _ in range(calls // 2 if warm_up is None else warm_up):
        call()


def run_burst(world: Any, call: Call, calls: int, warm_up: int | None = None, timer: Timer = HOST_TIMER) -> float:
    """Return the seconds per call of the slowest rank."""
    settle(call, calls, warm_up)
    timer.finish()
    world.Barrier()
    return float(world.allreduce(timer.seconds(call, calls), MPI.MAX))


def run_fresh_burst(world: Any, call: Call, calls: int, rewrite: Call, warm_up: int | None = None) -> float:
    """Return the seconds per call of the slowest rank, on data that each rank has just written."""
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
    """Add the seconds of each call, on its slowest rank, to `single`; return their mean."""
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
    timer: Timer = HOST_TIMER,
) -> Burst:
    """Return the bursts of a contender, of `iters` calls each, or of a length based on an estimate.

    rewrite: called before each call. warm_up: the number of calls before each burst, else half a burst. single: a list
    for the time of each call. timer: of bursts; a call with `rewrite` or `single` is timed on its own, by the host.
    """
    in_bursts = partial(run_burst, timer=timer)
    run: Callable[..., float] = in_bursts if rewrite is None else partial(run_fresh_burst, rewrite=rewrite)
    if single is not None:
        run = partial(run_single_calls, single=single, rewrite=rewrite)
    if warm_up is not None:
        run = partial(run, warm_up=warm_up)
    if iters is not None:
        return lambda: run(world, call, iters)
    calls = _burst_length(in_bursts(world, call, FEWEST))

    def burst() -> float:
        nonlocal calls
        seconds = run(world, call, calls)
        if (
            seconds * calls > TOO_LONG * BURST_SECONDS
        ):  # the estimate was wrong, because other processes share the cores
            calls = _burst_length(seconds)
        return seconds

    return burst


def _burst_length(seconds: float) -> int:
    """Return the number of calls in a burst, for calls of `seconds` each."""
    return max(FEWEST, min(MOST, int(BURST_SECONDS / max(seconds, 1e-7))))


def rounds(bursts: Mapping[str, Burst], number: int) -> Iterator[dict[str, float]]:
    """Yield each contender's figure, round by round, every second round in the opposite order."""
    for index in range(number):
        order = list(bursts)[:: -1 if index % 2 else 1]
        yield {name: bursts[name]() for name in order}


def memory_pass(read: int, written: int, replaces: bool) -> Call:
    """Return a call that reads and writes private memory once, front to back, by numpy's fastest operations.

    read, written: bytes. replaces: write to the memory that was read, an update in place; else copy to other memory. If
    read is larger, the rest is only scanned; if written is larger, the same data is written again.
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
