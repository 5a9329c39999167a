"""Rows of experts in the memory of a late device, which poisons what is read too early."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import commlib
from commlib.communicator import Communicator
from commlib.config import Config
from commlib.runtime.process import Runtime
from commlib.transport.mpi import MpiTransport
from tests import experts_there
from tests.late import LATE


@pytest.fixture(scope="module", params=["staged", "direct", "peers", "apart"])
def group(request: pytest.FixtureRequest) -> Iterator[Communicator]:
    """All ranks: rows go through the host, as MPI takes them from the device, between the devices, or between nodes."""
    world = commlib.init()
    peers, one_node = request.param == "peers", request.param != "apart"
    settings = Config(timeout=20, device_slot_kib=64, device_peers=peers, node_path=one_node)
    runtime = Runtime(settings, world.runtime.ranks_on_node)
    devices = {"late"} if request.param == "direct" else set()
    made = Communicator(MpiTransport(world.native.Dup(), devices=devices), runtime, f"late {request.param}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LATE, "has_signals", True)
        yield made
        made.close()


@pytest.mark.usefixtures("no_races")
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_there_and_back(group: Any, dtype: str) -> None:
    experts_there.there_and_back(group, LATE.put, dtype)


@pytest.mark.usefixtures("no_races")
@pytest.mark.parametrize("body", experts_there.BODIES, ids=lambda body: body.__name__)
def test_body(group: Any, body: Any) -> None:
    body(group, LATE.put)


@pytest.mark.usefixtures("no_races")
@pytest.mark.ranks(min=2)
def test_ranks_that_mean_something_else(group: Any) -> None:
    experts_there.other_meanings(group, LATE.put)
