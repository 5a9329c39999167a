"""Channels between late devices: through device memory, through the host, and by messages."""

from __future__ import annotations

import contextlib
import random
import re
from typing import Any

import numpy as np
import pytest

import commlib
from commlib.communicator import Communicator
from commlib.config.settings import Config
from commlib.errors import PeerError, ShutdownError
from commlib.runtime.process import Runtime
from commlib.transport.mpi import MpiTransport
from tests.bodies import channels, device_channels
from tests.bodies.alarm import Alarm, alarm
from tests.late import LATE

pytestmark = [pytest.mark.usefixtures("no_races"), pytest.mark.any_ranks, pytest.mark.ranks(min=2)]


@pytest.fixture(scope="module", params=["peers", "between", "off", "apart", "refused", "messages"])
def group(request):
    """All ranks: peer memory used, forbidden, or missing on one; streams unable or forbidden to meet; between nodes."""
    world = commlib.init()
    config = Config(
        timeout=20,
        node_path=request.param != "messages",
        device_peers=request.param != "off",
        device_ipc=request.param != "between",
    )
    runtime = Runtime(config, world.runtime.ranks_on_node)
    with pytest.MonkeyPatch.context() as patch:
        # One rank without it is enough.
        patch.setattr(LATE, "has_signals", request.param != "refused" or world.rank == 0)
        patch.setattr(LATE, "has_reach", request.param != "apart" or world.rank == 0)
        group = Communicator(MpiTransport(world.native.Dup()), runtime, f"device channels {request.param}")
        yield group
        assert runtime.drain(20) == ""
        world.barrier()
        group.close()


SLOW = device_channels.nothing_grows
CHECKS = [pytest.param(check, marks=pytest.mark.long) if check is SLOW else check for check in device_channels.ALL]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_channel_bodies(group, check):
    try:
        if group.rank < 2:
            check(group, 1 - group.rank, LATE, LATE)
    finally:
        commlib.init().native.Barrier()  # the others wait longer than a group does, where the machine is busy


def test_one_side_raises(group, monkeypatch):
    try:
        if group.rank < 2:
            device_channels.one_side_raises(group, 1 - group.rank, LATE, LATE, monkeypatch)
    finally:
        group.barrier()


@pytest.mark.parametrize(
    "check", [device_channels.a_stream_waits_in_vain, device_channels.a_failed_channel_releases_streams]
)
def test_streams_wait_in_vain(group, monkeypatch, check):
    try:
        if group.rank < 2 and group.name.endswith("peers"):
            check(group, 1 - group.rank, LATE, LATE, monkeypatch)
    finally:
        group.barrier()


def test_device_channels_are_used_where_possible(group):
    """Everything that can goes from device to device, and the host then carries no data."""
    if group.rank < 2:
        with group.channel(1 - group.rank, "way", (50_000,), device=LATE) as channel:
            assert channel.is_direct == group.name.endswith(("peers", "between", "apart"))
            assert bool(channel.ends.device.host_slots_reason) == (group.name.endswith(("between", "apart")))
            channel.send(LATE.put(np.full(50_000, group.rank, np.float32)))
            if channel.is_direct:
                assert channel.ends.outgoing.form.nbytes(channel.ends.outgoing.shape) < 200
            device_channels.same(LATE, channel.recv(), np.full(50_000, 1 - group.rank, np.float32))
            channels.synchronise(group, 1 - group.rank)
    group.barrier()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_alarms_at_any_time(group):
    """Rank 0 is interrupted repeatedly: no message is lost, duplicated or changed, or the channel reports failure."""
    if group.rank < 2:
        delay, peer, interrupted = random.Random(4), 1 - group.rank, 0
        for round_number in range(8):
            channel = group.channel(peer, f"alarms {round_number}", (200,), "int64", 2, device=LATE)
            arrays = [LATE.put(np.full(200, step)) for step in range(150)] if group.rank == 0 else []
            LATE.synchronise()
            received: list[Any] = []
            step = 0
            try:
                while step < 150:
                    try:
                        with alarm(delay.random() * 3e-3, again=0) if group.rank == 0 else contextlib.nullcontext():
                            while step < 150:
                                if group.rank == 0:
                                    channel.send(arrays[step])
                                else:
                                    received.append(channel.recv())
                                    channel.release(received[-1])
                                step += 1
                    except Alarm:
                        interrupted += 1
                        if channel.is_direct and step < 150 and channel.ends.outgoing.count != step:
                            assert channel.ends.outgoing.count == step + 1
                            step += 1  # it was sent, but Python was interrupted before counting it
                        elif not channel.is_direct:
                            break  # whether it was queued is unknown
                if group.rank == 0 and channel.is_direct:
                    channel.recv(timeout=20)  # the other rank has them all
                elif channel.is_direct:
                    channel.send(LATE.put(np.zeros(200, np.int64)))
            except ShutdownError as error:
                assert group.rank == 0 and re.search(r"ended half-way by (Alarm|an exception)", str(error))
            except PeerError as error:
                assert group.rank == 1 and re.search("has given up this channel|has closed this channel", str(error))
            if group.rank == 0:
                channel.close()
            for number, view in enumerate(received):
                np.testing.assert_array_equal(view.numpy(), number)
            channels.synchronise(group, peer)
            channel.close()
        assert interrupted >= 8 or group.rank == 1
    group.barrier()
