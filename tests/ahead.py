"""python -m tests.ahead: compile the kernels that tests run, before a test counts seconds or gives up after some.

Processes that come to the same kernel wait for one of them, so each of these two has work of its own.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np

from commlib.config import Config
from commlib.dtypes import kernel_operation
from commlib.kernels.host.reduce import reduce_function
from tests import compressing
from tests.every_verb import calls
from tests.loopback import run
from tests.oracle import REDUCIBLE


def reductions(which: slice) -> None:
    """Compile the arithmetic of a share of the pairs of dtype and operation."""
    for dtype, op in REDUCIBLE[which]:
        reduce_function(dtype, kernel_operation(dtype, op))


def verbs() -> None:
    def rank(comm: Any) -> None:
        for _, _, call in calls(comm):
            call()
        for count in (3, 100_000):
            x, other = np.ones(count), 1 - comm.rank
            comm.send_recv(x, other, x.copy(), other)

    on_two_ranks(rank)


def compression() -> None:
    def rank(comm: Any) -> None:
        for name in compressing.COMPRESSIONS:
            compressing.train(comm, name, within_node=True, on_device=False)

    on_two_ranks(rank)


def on_two_ranks(rank: Callable[[Any], None]) -> None:
    for nodes in ([0, 0], [0, 1]):
        run(2, rank, nodes=nodes, config=Config(timeout=0))


def share(work: Callable[[], None], pairs: slice) -> None:
    work()
    reductions(pairs)


def main() -> None:
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        for _ in pool.map(share, (verbs, compression), (slice(0, None, 2), slice(1, None, 2))):
            pass  # raises what a process has raised


if __name__ == "__main__":
    main()
