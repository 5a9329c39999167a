"""Pipelines whose values travel between late devices, also where only some ranks have device stages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import commlib
from commlib.communicator import Communicator
from commlib.config.settings import Config
from commlib.errors import PeerError
from commlib.p2p.channels.device_channel import DeviceChannel
from commlib.pipeline.pipe import Pipe
from commlib.pipeline.schedule import Link, Schedule, chain, make, table
from commlib.runtime.process import Runtime
from commlib.transport.mpi import MpiTransport
from tests.bodies.pipelines import ArraysOnDevice, ArrayStage, ArrayTensors, batch_of, expected, random_schedule
from tests.late import LATE

pytestmark = [pytest.mark.usefixtures("no_races"), pytest.mark.any_ranks]


@pytest.fixture(scope="module", params=["peers", "off"])
def group(request: pytest.FixtureRequest) -> Iterator[Communicator]:
    world = commlib.init()
    runtime = Runtime(Config(timeout=20, device_peers=request.param == "peers"), world.runtime.ranks_on_node)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LATE, "has_signals", True)
        group = Communicator(MpiTransport(world.native.Dup()), runtime, f"device pipeline {request.param}")
        yield group
        world.barrier()
        group.close()


def train(comm: Any, schedule: Schedule, links: tuple[Link, ...], tensors: Any, inputs: Any = batch_of, **options: Any):
    stages = {stage: ArrayStage(stage, links, inputs) for stage in schedule.stages_of(comm.rank)}
    pipe = Pipe(comm, schedule, links, stages, tensors, **options)
    for _ in range(2):
        pipe.train()
    losses, gradients = expected(links, schedule.stages, range(schedule.microbatches))
    if inputs is batch_of:
        for number, stage in stages.items():
            assert stage.gradient == 2 * gradients[number]
            if number == schedule.stages - 1:
                assert stage.losses == losses
    return pipe, stages


@pytest.mark.parametrize("name", [name for name, plan in table.items() if not plan.updates])
def test_every_schedule(group: Any, name: str) -> None:
    schedule = make(name, group.size, 5)
    queued = LATE.queued
    pipe, _ = train(group, schedule, chain(schedule.stages), ArraysOnDevice(LATE, LATE))
    assert LATE.queued > queued or group.size == 1
    pipe.forward()
    pipe.close()


def test_random_schedules(group: Any) -> None:
    for seed in range(8):
        schedule, links = random_schedule(seed, ranks=group.size)
        train(group, schedule, links, ArraysOnDevice(LATE, LATE))[0].close()


def test_long_messages(group: Any) -> None:
    def inputs(microbatch: int) -> Any:
        return np.full((1, 3, 1 << 12, 1 << 17)[microbatch % 4], 1.0 + microbatch)

    pipe, stages = train(group, make("gpipe", group.size, 8), chain(group.size), ArraysOnDevice(LATE, LATE), inputs)
    factor = np.prod([stage + 2.0 for stage in range(group.size)])
    for number, stage in stages.items():
        assert stage.gradient == 2 * sum(3 * factor / (number + 2.0) * float(inputs(m).sum()) for m in range(8))
    pipe.close()


@pytest.mark.ranks(min=2)
def test_one_rank_on_the_host_among_others(group: Any) -> None:
    """Its values travel through the host, in both directions; all others go from device to device."""
    tensors = ArrayTensors() if group.rank == 0 else ArraysOnDevice(LATE, LATE)
    schedule = make("1f1b", group.size, 4)
    pipe, _ = train(group, schedule, chain(group.size), tensors)
    pipe.close()


@pytest.mark.ranks(min=2)
def test_encoded(group: Any) -> None:
    """bfloat16 represents these values exactly, if they are small."""

    def inputs(microbatch: int) -> Any:
        return np.full(6, 1.0 + microbatch, np.float32)

    schedule = make("1f1b", group.size, 4)
    pipe, stages = train(group, schedule, chain(group.size), ArraysOnDevice(LATE, LATE), inputs, codec="bf16")
    factor = np.prod([stage + 2.0 for stage in range(group.size)])
    if group.size - 1 in stages and group.size < 4:
        assert stages[group.size - 1].losses == {m: 3 * factor * float(inputs(m).sum()) for m in range(4)}
    pipe.close()


@pytest.mark.ranks(min=2)
def test_a_failed_stage_is_reported(group: Any) -> None:
    def before(action: Any) -> None:
        if action.microbatch == 2 and part.rank == last:
            raise ZeroDivisionError("no rows")

    part = group.split(0)
    links = chain(group.size)
    last = group.size - 1
    stage = ArrayStage(part.rank, links, batch_of, before=before)
    pipe = Pipe(part, make("gpipe", group.size, 4), links, {part.rank: stage}, ArraysOnDevice(LATE, LATE))
    with pytest.raises((ZeroDivisionError, PeerError)) as caught:
        pipe.train()
    if part.rank == last - 1:
        assert "ZeroDivisionError: no rows" in str(caught.value)
    group.barrier()


@pytest.mark.ranks(min=2)
def test_which_channels_are_used(group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Any] = []
    channel = Communicator.channel

    def noted(self: Any, *args: Any, **options: Any) -> Any:
        opened.append(channel(self, *args, **options))
        return opened[-1]

    monkeypatch.setattr(Communicator, "channel", noted)
    pipe, _ = train(group, make("1f1b", group.size, 4), chain(group.size), ArraysOnDevice(LATE, LATE))
    assert opened and all(isinstance(one, DeviceChannel) for one in opened)
    assert {one.is_direct for one in opened} == {group.name.endswith("peers")}
    pipe.close()
