"""Network measurements in about half a second: two ranks of a node, two of different nodes, all ranks together.

These are quick estimates: `commlib bench` and `commlib tune` measure with care.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from commlib.communicator import Communicator
from commlib.diagnosis.facts import MeasuredLink, NetworkFacts

SECONDS = 0.1  # for each figure
SMALL, LARGEST = 8, 4 << 20  # bytes
_BATCHES, _MOST = 5, 2000  # calls in each, at most


def measure(comm: Communicator, seconds: float = SECONDS) -> NetworkFacts | None:
    """Return the measurements, the same on all ranks; None for one rank. Collective.

    seconds: for each figure; compilation and connection at the first use take extra time.
    """
    if comm.size == 1:
        return None
    nodes = comm.topology.nodes
    neighbours = next(((ranks[0], ranks[1]) for ranks in nodes if len(ranks) > 1), None)
    across = (nodes[0][0], nodes[1][0]) if len(nodes) > 1 else None
    node, between = (None if pair is None else _link(comm, pair, seconds) for pair in (neighbours, across))
    together = {nbytes: _all_reduce(comm, nbytes, seconds) for nbytes in (SMALL, LARGEST // 4)}
    return NetworkFacts(node, between, together)


def _link(comm: Communicator, pair: tuple[int, int], seconds: float) -> MeasuredLink:
    small = _round_trip(comm, pair, SMALL, seconds)
    middle = _round_trip(comm, pair, 64 << 10, seconds / 4)
    # On a slow link the largest message would take too long.
    nbytes = LARGEST if middle < seconds / 256 else 64 << 10
    large = _round_trip(comm, pair, nbytes, seconds) if nbytes == LARGEST else middle
    return MeasuredLink(pair, small / 2, 2 * nbytes / large, nbytes)


def _round_trip(comm: Communicator, pair: tuple[int, int], nbytes: int, seconds: float) -> float:
    """Return the minimum seconds of a message there and back. Collective; all ranks return the same."""
    data = np.zeros(nbytes, np.uint8)
    first, second = pair

    def once() -> None:
        if comm.rank == first:
            comm.send(data, second)
            comm.recv(data, second)
        elif comm.rank == second:
            comm.recv(data, first)
            comm.send(data, first)

    return _least(comm, first, once, seconds)


def _all_reduce(comm: Communicator, nbytes: int, seconds: float) -> float:
    data = comm.empty(nbytes // 4)
    data[:] = 0
    return _least(comm, 0, lambda: comm.all_reduce(data, out=data), seconds)


def _least(comm: Communicator, clock: int, once: Callable[[], object], seconds: float) -> float:
    """Return the minimum mean time of a call of all ranks, over several batches, on the clock of one rank.

    A single call can seem too short, if that rank arrives last.
    """
    for _ in range(2):  # compile, and connect
        once()
    first = _timed(once, 1)
    count = int(comm.broadcast_object(max(1, min(_MOST, int(seconds / _BATCHES / first))), root=clock))
    return float(comm.broadcast_object(min(_timed(once, count) for _ in range(_BATCHES)), root=clock))


def _timed(once: Callable[[], object], count: int) -> float:
    began = time.perf_counter()
    for _ in range(count):
        once()
    return (time.perf_counter() - began) / count
