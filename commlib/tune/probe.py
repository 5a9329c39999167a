"""Measure alpha, beta and gamma: two ranks that send to each other, and all ranks that combine.

Of several times the least counts: whatever else runs on the machine can only add to it.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from commlib.communicator import Communicator
from commlib.execution.reduce_op import ReduceOp
from commlib.execution.streaming import Region
from commlib.schedule import Link, Program, Recv, Round, Send, Span, even
from commlib.tune.fit import fit_gamma, fit_link
from commlib.tune.stopwatch import Call, Stopwatch

# 8 B to 2 MiB. The first two make a line; the last ones take seconds on a slow link, and there is not always time.
MESSAGES = tuple(8 << 2 * power for power in (0, 7, 4, 6, 2, 5, 1, 3, 8, 9))
COMBINED = (256 << 10, 1 << 20, 4 << 20)
FEWEST_ROUNDS, MOST_ROUNDS, ROUNDS_BYTES = 4, 100, 4 << 20
FEWEST_SIZES = 2  # a line needs two points


def measure_link(comm: Communicator, pair: tuple[int, int], watch: Stopwatch, share: float) -> Link:
    """Return alpha and beta between two ranks of `comm`. Collective; takes about `share` seconds.

    In a round both send and receive at once, as they do in most algorithms, through the executor that runs those: so
    alpha contains what a round costs in Python.
    """
    group = comm.split(0 if comm.rank in pair else -1, comm.rank)
    samples: list[tuple[float, float]] = []
    end = watch.left - share
    for nbytes in MESSAGES:
        if len(samples) >= FEWEST_SIZES and watch.left <= end:
            break
        rounds = max(FEWEST_ROUNDS, min(MOST_ROUNDS, ROUNDS_BYTES // nbytes))
        call = None if group is None else _exchange(group, nbytes, rounds)
        samples.append((nbytes, min(watch.measure(call, share / len(MESSAGES))) / rounds))
    return fit_link(samples)


def _exchange(group: Communicator, nbytes: int, rounds: int) -> Call:
    peer = 1 - group.rank
    mine, theirs = Span(group.rank, group.rank + 1), Span(peer, peer + 1)
    step = Round((Send(peer, mine),), (Recv(peer, theirs),))
    program = Program("exchange", "pair", group.rank, 2, 0, (2,), (step,) * rounds)
    region = Region(np.zeros(2 * nbytes, np.uint8), even(2 * nbytes, 2))
    return partial(group.group.execute, program, [[region]], "exchange")


def measure_gamma(watch: Stopwatch, share: float) -> float:
    """Return gamma, of float32 sums, while all ranks combine at the same time and share the memory. Collective."""
    reduce_op = ReduceOp("float32", "sum")
    samples: list[tuple[float, float]] = []
    end = watch.left - share
    for nbytes in COMBINED:
        if len(samples) >= FEWEST_SIZES and watch.left <= end:
            break
        first, second = np.zeros(nbytes // 4, np.float32), np.zeros(nbytes // 4, np.float32)
        call = partial(reduce_op.combine, [first, second], first)
        samples.append((nbytes, min(watch.measure(call, share / len(COMBINED)))))
    return fit_gamma(samples)
