"""python -m tests.ahead: compile the kernels that tests run, before a test counts seconds or gives up after some.

Processes that come to the same kernel wait for one of them, so each of these has work of its own.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np

from commlib.config import Config
from commlib.dtypes import NUMPY, kernel_operation
from commlib.expert import Experts
from commlib.expert.alone import Alone
from commlib.expert.on_node import OnNode
from commlib.expert.placement import Placement
from commlib.expert.routing import route
from commlib.kernels.host.reduce import reduce_function
from commlib.kernels.host.rows import multiply_rows
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


def experts() -> None:
    def there_and_back(exchange: Any) -> None:
        for kind in ("float32", "float64", "float16", "bfloat16"):
            x = np.ones((4, 3), NUMPY[kind])
            passage, rows, gates, _ = exchange.dispatch("ahead", routing, x, routing.gates)
            exchange.combine("ahead", passage, rows, gates)
            of_rows, of_gates = np.empty_like(rows), np.empty_like(gates)
            multiply_rows(exchange.combine_back("ahead", passage, x), rows, gates, of_rows, of_gates)
            exchange.dispatch_back("ahead", passage, of_rows, of_gates)

    routing = route(Experts(2, top_k=1, capacity_factor=1.0), np.ones((4, 2), np.float32), training=True)
    routing.gradient(routing.gates, 1.0, 1.0)
    there_and_back(Alone(Placement.even(2, 1)))  # where no rank waits for another one that compiles
    run(2, lambda comm: there_and_back(OnNode(comm, Placement.even(2, 2))), config=Config(timeout=0))


def on_two_ranks(rank: Callable[[Any], None]) -> None:
    for nodes in ([0, 0], [0, 1]):
        run(2, rank, nodes=nodes, config=Config(timeout=0))


def share(work: Callable[[], None], pairs: slice) -> None:
    work()
    reductions(pairs)


def main() -> None:
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        for _ in pool.map(share, (verbs, compression, experts), (slice(0, None, 2), slice(1, None, 2), slice(0, 0))):
            pass  # raises what a process has raised


if __name__ == "__main__":
    main()
