"""Channels between devices, on the late one: between memories of the devices, through the host, and by messages."""

from __future__ import annotations

import numpy as np
import pytest

import commlib
from commlib.communicator import Communicator
from commlib.config import Config
from commlib.runtime.process import Runtime
from commlib.transport.mpi import MpiTransport
from tests import channels, device_channels
from tests.late import LATE

pytestmark = [pytest.mark.usefixtures("no_races"), pytest.mark.any_ranks, pytest.mark.ranks(min=2)]


@pytest.fixture(scope="module", params=["peers", "refused", "off", "messages"])
def group(request):
    """All ranks: devices reach each other; or cannot, which is found out; or may not; or as if between nodes."""
    world = commlib.init()
    config = Config(timeout=20, node_path=request.param != "messages", device_peers=request.param != "off")
    runtime = Runtime(config, world.runtime.ranks_on_node)
    with pytest.MonkeyPatch.context() as patch:
        # One rank that cannot is enough.
        patch.setattr(LATE, "has_signals", request.param != "refused" or world.rank == 0)
        group = Communicator(MpiTransport(world.native.Dup()), runtime, f"device channels {request.param}")
        yield group
        assert runtime.drain(20) == ""
        world.barrier()
        group.close()


@pytest.mark.parametrize("check", device_channels.ALL, ids=lambda check: check.__name__)
def test_of_every_channel(group, check):
    try:
        if group.rank < 2:
            check(group, 1 - group.rank, LATE, LATE)
    finally:
        group.barrier()


def test_a_side_that_raises(group, monkeypatch):
    try:
        if group.rank < 2:
            device_channels.a_side_that_raises(group, 1 - group.rank, LATE, LATE, monkeypatch)
    finally:
        group.barrier()


@pytest.mark.parametrize(
    "check", [device_channels.a_stream_that_waits_in_vain, device_channels.a_failed_channel_lets_streams_go]
)
def test_streams_that_wait_in_vain(group, monkeypatch, check):
    try:
        if group.rank < 2 and group.name.endswith("peers"):
            check(group, 1 - group.rank, LATE, LATE, monkeypatch)
    finally:
        group.barrier()


def test_the_way(group):
    """All that can goes between the devices, and the host carries no data then."""
    if group.rank < 2:
        with group.channel(1 - group.rank, "way", (50_000,), device=LATE) as channel:
            assert channel.is_direct == group.name.endswith("peers")
            channel.send(LATE.put(np.full(50_000, group.rank, np.float32)))
            if channel.is_direct:
                assert channel.ends.outgoing.form.nbytes(channel.ends.outgoing.shape) < 200
            device_channels.same(LATE, channel.recv(), np.full(50_000, 1 - group.rank, np.float32))
            channels.meet(group, 1 - group.rank)
    group.barrier()
