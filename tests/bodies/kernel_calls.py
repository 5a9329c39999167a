"""Calls that need most of the kernels, to check that `commlib warm` has compiled them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from commlib.config.settings import Config
from commlib.dtypes import NUMPY
from commlib.expert import Experts
from commlib.expert.local_dispatcher import LocalDispatcher
from commlib.expert.placement import ExpertPlacement
from commlib.expert.routing import route
from commlib.expert.shared_memory_dispatcher import SharedMemoryDispatcher
from commlib.kernels.host.rows import multiply_rows
from tests.bodies import compression
from tests.bodies.every_verb import calls
from tests.bodies.loopback import run


def verbs() -> None:
    def rank(comm: Any) -> None:
        for _, _, call in calls(comm):
            call()
        for count in (3, 100_000):
            x, peer = np.ones(count), 1 - comm.rank
            comm.send_recv(x, peer, x.copy(), peer)

    on_two_ranks(rank)


def compressed_steps() -> None:
    def rank(comm: Any) -> None:
        for name in compression.COMPRESSIONS:
            compression.train(comm, name, within_node=True, on_device=False)

    on_two_ranks(rank)


def experts() -> None:
    def there_and_back(exchange: Any) -> None:
        for kind in ("float32", "float64", "float16", "bfloat16"):
            x = np.ones((4, 3), NUMPY[kind])
            plan, rows, gates, _ = exchange.dispatch("experts", routing, x, routing.gates)
            exchange.combine("experts", plan, rows, gates)
            of_rows, of_gates = np.empty_like(rows), np.empty_like(gates)
            multiply_rows(exchange.combine_back("experts", plan, x), rows, gates, of_rows, of_gates)
            exchange.dispatch_back("experts", plan, of_rows, of_gates)

    routing = route(Experts(2, top_k=1, capacity_factor=1.0), np.ones((4, 2), np.float32), training=True)
    routing.gradient(routing.gates, 1.0, 1.0)
    there_and_back(LocalDispatcher(ExpertPlacement.even(2, 1)))  # where no rank waits for another one that compiles
    run(
        2,
        lambda comm: there_and_back(SharedMemoryDispatcher(comm, ExpertPlacement.even(2, 2))),
        config=Config(timeout=0),
    )


def on_two_ranks(rank: Callable[[Any], None]) -> None:
    for nodes in ([0, 0], [0, 1]):
        run(2, rank, nodes=nodes, config=Config(timeout=0))


WORK = (verbs, compressed_steps, experts)
