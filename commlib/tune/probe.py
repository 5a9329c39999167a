"""Measure alpha, beta and gamma: two ranks exchange messages, and all ranks combine arrays.

The least of several times counts: other load on the machine can only add to it.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from commlib.communicator import Communicator
from commlib.execution.reduce_function import ReduceFunction
from commlib.execution.streaming import Region
from commlib.schedule import LinkCost, Program, Recv, Round, Send, Span, even
from commlib.tune.fit import fit_gamma, fit_link
from commlib.tune.stopwatch import Stopwatch, TimedCall

# 8 B to 2 MiB. The first two define a line; the last ones take seconds on a slow link, so time may run out before them.
MESSAGES = tuple(8 << 2 * power for power in (0, 7, 4, 6, 2, 5, 1, 3, 8, 9))
COMBINED = (256 << 10, 1 << 20, 4 << 20)
FEWEST_ROUNDS, MOST_ROUNDS, ROUNDS_BYTES = 4, 100, 4 << 20
FEWEST_SIZES = 2  # a line needs two points


def measure_link(comm: Communicator, pair: tuple[int, int], watch: Stopwatch, share: float) -> LinkCost:
    """Return alpha and beta between two ranks of `comm`. Collective; takes about `share` seconds.

    In each round both send and receive at once, as in most algorithms, through the same executor. So alpha includes the
    cost of a round in Python.
    """
    group = comm.split(0 if comm.rank in pair else -1, comm.rank)
    samples: list[tuple[float, float]] = []
    end = watch.remaining - share
    for nbytes in MESSAGES:
        if len(samples) >= FEWEST_SIZES and watch.remaining <= end:
            break
        rounds = max(FEWEST_ROUNDS, min(MOST_ROUNDS, ROUNDS_BYTES // nbytes))
        call = None if group is None else _exchange(group, nbytes, rounds)
        samples.append((nbytes, min(watch.measure(call, share / len(MESSAGES))) / rounds))
    return fit_link(samples)


def _exchange(group: Communicator, nbytes: int, rounds: int) -> TimedCall:
    peer = 1 - group.rank
    mine, theirs = Span(group.rank, group.rank + 1), Span(peer, peer + 1)
    step = Round((Send(peer, mine),), (Recv(peer, theirs),))
    program = Program("exchange", "pair", group.rank, 2, 0, (2,), (step,) * rounds)
    region = Region(np.zeros(2 * nbytes, np.uint8), even(2 * nbytes, 2))
    return partial(group.group.programs.execute, program, [[region]], "exchange")


def measure_gamma(watch: Stopwatch, share: float) -> float:
    """Return gamma for float32 sums while all ranks combine at once and share the memory bandwidth. Collective."""
    reduce_op = ReduceFunction("float32", "sum")
    samples: list[tuple[float, float]] = []
    end = watch.remaining - share
    for nbytes in COMBINED:
        if len(samples) >= FEWEST_SIZES and watch.remaining <= end:
            break
        first, second = np.zeros(nbytes // 4, np.float32), np.zeros(nbytes // 4, np.float32)
        call = partial(reduce_op.combine, [first, second], first)
        samples.append((nbytes, min(watch.measure(call, share / len(COMBINED)))))
    return fit_gamma(samples)
