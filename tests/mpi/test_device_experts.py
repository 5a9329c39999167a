"""Experts' rows in the memory of a late device, which poisons whatever is read too early."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import commlib
from commlib.communicator import Communicator
from commlib.config.settings import Config
from commlib.errors import StallError
from commlib.expert.dispatchers import dispatcher_over
from commlib.expert.placement import ExpertPlacement
from commlib.runtime.process import Runtime
from commlib.sharding.axis import ParallelAxis
from commlib.transport.mpi import MpiTransport
from tests.bodies import device_experts
from tests.bodies.device_experts import EXPERTS, fetch
from tests.late import LATE
from tests.unit.expert.test_exchange import assign


@pytest.fixture(scope="module", params=["staged", "direct", "peers", "apart"])
def group(request: pytest.FixtureRequest) -> Iterator[Communicator]:
    """All ranks: rows go through the host, through MPI from the device, between the devices, or between nodes."""
    world = commlib.init()
    peers, one_node = request.param == "peers", request.param != "apart"
    settings = Config(timeout=20, device_slot_kib=64, device_peers=peers, node_path=one_node)
    runtime = Runtime(settings, world.runtime.ranks_on_node)
    devices = {"late"} if request.param == "direct" else set()
    created = Communicator(MpiTransport(world.native.Dup(), devices=devices), runtime, f"late {request.param}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LATE, "has_signals", True)
        yield created
        created.close()


@pytest.mark.usefixtures("no_races")
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_there_and_back(group: Any, dtype: str) -> None:
    device_experts.there_and_back(group, LATE.put, dtype)


@pytest.mark.usefixtures("no_races")
@pytest.mark.parametrize("body", device_experts.BODIES, ids=lambda body: body.__name__)
def test_body(group: Any, body: Any) -> None:
    body(group, LATE.put)


@pytest.mark.usefixtures("no_races")
@pytest.mark.ranks(min=2)
def test_ranks_that_disagree(group: Any) -> None:
    device_experts.ranks_that_disagree(group, LATE.put)


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("peers", [False, True])
def test_an_absent_rank_is_named(peers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others get its number, and their streams continue."""
    monkeypatch.setattr(LATE, "has_signals", True)
    world = commlib.init()
    runtime = Runtime(Config(timeout=1, device_peers=peers), world.runtime.ranks_on_node)
    comm = Communicator(MpiTransport(world.native.Dup()), runtime, "someone is missing")
    exchange = dispatcher_over(ParallelAxis(comm), ExpertPlacement.even(EXPERTS, comm.size))
    x, gates = LATE.wrap(LATE.put(np.ones((3, 8), np.float32)), "x"), np.ones(3 * EXPERTS, np.float32)
    plan, rows, received_gates, _ = exchange.dispatch("one", assign(np.ones((3, EXPERTS), bool)), x, gates)
    np.testing.assert_array_equal(fetch(rows), 1)
    if comm.rank != 1:
        with pytest.raises(StallError, match="rank 1"):
            exchange.combine("one", plan, rows, received_gates)
    LATE.synchronise()
    world.barrier()
