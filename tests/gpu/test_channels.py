"""Channels between the ranks' GPUs, and through the host."""

from __future__ import annotations

import gc

import pytest

from commlib.p2p.device.sender import free_unused
from commlib.pipeline.pipe import Pipe
from commlib.pipeline.schedule import chain, make
from tests.bodies import device_channels
from tests.bodies.pipelines import ArraysOnDevice, ArrayStage, batch_of, expected

pytestmark = pytest.mark.ranks(min=2)


@pytest.mark.parametrize("check", device_channels.ALL, ids=lambda check: check.__name__)
def test_channel_bodies(comm, gpu, check):
    try:
        if comm.rank < 2:
            check(comm, 1 - comm.rank, gpu, gpu.device)
    finally:
        comm.barrier()


def test_one_side_raises(comm, gpu, monkeypatch):
    try:
        if comm.rank < 2:
            device_channels.one_side_raises(comm, 1 - comm.rank, gpu, gpu.device, monkeypatch)
    finally:
        comm.barrier()


def test_memory_is_given_back(comm, gpu):
    """On both ranks, once both have closed a channel that has grown."""
    pool = gpu.cupy.get_default_memory_pool()

    def free():
        gc.collect()
        free_unused()
        gpu.fetch(gpu.device.empty((1,), "float32"))
        return gpu.cupy.cuda.runtime.memGetInfo()[0] + pool.total_bytes()

    try:
        if comm.rank < 2:
            device_channels.memory_is_freed(comm, 1 - comm.rank, gpu, gpu.device, free)
    finally:
        comm.barrier()


@pytest.mark.parametrize(
    "check", [device_channels.a_stream_waits_in_vain, device_channels.a_failed_channel_releases_streams]
)
def test_streams_wait_in_vain(comm, gpu, monkeypatch, check):
    try:
        if comm.rank < 2 and comm.config.device_peers:
            check(comm, 1 - comm.rank, gpu, gpu.device, monkeypatch)
    finally:
        comm.barrier()


@pytest.mark.parametrize("name", ["1f1b", "zb_v"])
def test_a_pipeline(comm, gpu, name):
    schedule = make(name, comm.size, 6)
    links = chain(schedule.stages)
    stages = {stage: ArrayStage(stage, links, batch_of) for stage in schedule.stages_of(comm.rank)}
    pipe = Pipe(comm, schedule, links, stages, ArraysOnDevice(gpu, gpu.device))
    for _ in range(3):
        pipe.train()
    losses, gradients = expected(links, schedule.stages, range(6))
    for number, stage in stages.items():
        assert stage.gradient == 3 * gradients[number]
        assert stage.losses == (losses if number == schedule.stages - 1 else {})
    pipe.close()
