"""Latency and bandwidth between every two ranks: ping-pong by send and recv, one pair after another.

While two ranks exchange messages, the others sleep, so that they do not disturb the pair on the network or the cores.
The time of a message is half of a round trip, the median over bursts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from itertools import combinations
from typing import Any

import numpy as np

from commlib.bench.options import BenchOptions, BenchOptionsError
from commlib.dtypes import Array

DEFAULT_SIZES = (8, 4 << 20)
LATENCY_UP_TO = 64 << 10  # bytes; for longer messages the figure is a bandwidth
BURST_SECONDS, FEWEST, MOST = 0.01, 2, 1000
NAP = 0.0005  # seconds between two checks whether the others have ended

_MEANS_SOMETHING = ("verb", "sizes", "rounds", "iters", "warmup_iters", "check", "csv", "out")
_NAMES = {
    "dtypes": "dtype",
    "ops": "op",
    "peers": "peer",
    "asynchronous": "async",
    "symmetric": "symmetric, --ordinary",
}

ProgressReport = Callable[[float, str], None]


@dataclass(frozen=True, slots=True)
class Matrix:
    """The times of messages of one size: seconds of each pair (lower rank, higher rank)."""

    nbytes: int
    seconds: dict[tuple[int, int], float]

    @property
    def is_latency(self) -> bool:
        """Whether the figures are microseconds; else they are GB/s."""
        return self.nbytes <= LATENCY_UP_TO

    @property
    def unit(self) -> str:
        return "us" if self.is_latency else "GB/s"

    def figure(self, pair: tuple[int, int]) -> float:
        """Return microseconds of a message, or GB/s (10^9 bytes), of a pair in either order."""
        seconds = self.seconds[min(pair), max(pair)]
        return seconds * 1e6 if self.is_latency else self.nbytes / seconds / 1e9

    def slowest(self) -> tuple[int, int]:
        """Return the pair with the longest time."""
        return max(self.seconds, key=lambda pair: self.seconds[pair])


def check(options: BenchOptions, ranks: int) -> tuple[int, ...]:
    """Return the sizes to measure. Raises Refused for options that have no effect on pairs, and for a single rank."""
    usual = BenchOptions("pairs")
    for field in fields(BenchOptions):
        if field.name not in _MEANS_SOMETHING and getattr(options, field.name) != getattr(usual, field.name):
            raise BenchOptionsError(
                f"pairs has no --{_NAMES.get(field.name, field.name.replace('_', '-'))}: leave it out"
            )
    if ranks < 2:
        raise BenchOptionsError("one rank has no pair: start more, as in 'mpirun -n 8 commlib bench pairs'")
    for name, value, least in (
        ("rounds", options.rounds, 1),
        ("iters", options.iters, 1),
        ("warmup-iters", options.warmup_iters, 0),
    ):
        if value is not None and value < least:
            raise BenchOptionsError(f"--{name} is {value}: expected at least {least}")
    return tuple(dict.fromkeys(options.sizes or DEFAULT_SIZES))


def measure(comm: Any, world: Any, options: BenchOptions, report: ProgressReport) -> tuple[list[Matrix], int]:
    """Return a matrix for each size, and the number of wrong bytes; the same on all ranks. Collective.

    report: called with the fraction that is done, and the next pair.
    """
    sizes = check(options, comm.size)
    pairs = list(combinations(range(comm.size), 2))
    mine: dict[tuple[int, int, int], float] = {}
    wrong = 0
    for number, nbytes in enumerate(sizes):
        data = (np.arange(nbytes) % 251).astype(np.uint8)
        for index, pair in enumerate(pairs):
            report(
                (number * len(pairs) + index) / (len(sizes) * len(pairs)), f"ranks {pair[0]} and {pair[1]}, {nbytes} B"
            )
            if comm.rank == pair[0]:
                back = np.empty_like(data)
                mine[nbytes, *pair] = _serve(comm, world, data, back, pair[1], options)
                wrong += int(np.count_nonzero(back != data)) if options.check else 0
            elif comm.rank == pair[1]:
                _return(comm, world, data, pair[0])
            _sleep_until_all_are_here(world)
    times = {key: seconds for part in world.allgather(mine) for key, seconds in part.items()}
    matrices = [Matrix(nbytes, {pair: times[nbytes, *pair] for pair in pairs}) for nbytes in sizes]
    return matrices, sum(world.allgather(wrong))


def _serve(comm: Any, world: Any, data: Array, back: Array, peer: int, options: BenchOptions) -> float:
    """Exchange messages with `peer` and return the median seconds of a message."""

    def burst(trips: int) -> float:
        world.send(trips, peer)
        start = time.perf_counter()
        for _ in range(trips):
            comm.send(data, peer)
            comm.recv(back, peer)
        return (time.perf_counter() - start) / trips / 2

    burst(FEWEST)  # connect
    trips = options.iters or max(FEWEST, min(MOST, int(BURST_SECONDS / 2 / burst(FEWEST))))
    times = []
    for _ in range(options.rounds):
        if warm_up := trips // 2 if options.warmup_iters is None else options.warmup_iters:
            burst(warm_up)
        times.append(burst(trips))
    world.send(0, peer)
    return statistics.median(times)


def _return(comm: Any, world: Any, data: Array, peer: int) -> None:
    """Return messages to `peer` unchanged, until there is no further burst."""
    received = np.empty_like(data)
    while trips := world.recv(source=peer):
        for _ in range(trips):
            comm.recv(received, peer)
            comm.send(received, peer)


def _sleep_until_all_are_here(world: Any) -> None:
    """Wait for all ranks without occupying a core."""
    everyone = world.Ibarrier()
    while not everyone.Test():
        time.sleep(NAP)
