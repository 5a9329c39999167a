"""Channels between the ranks' GPUs, and by way of the host."""

from __future__ import annotations

import gc

import pytest

from commlib.p2p import given_up
from tests import device_channels

pytestmark = pytest.mark.ranks(min=2)


@pytest.mark.parametrize("check", device_channels.ALL, ids=lambda check: check.__name__)
def test_of_every_channel(comm, gpu, check):
    try:
        if comm.rank < 2:
            check(comm, 1 - comm.rank, gpu, gpu.device)
    finally:
        comm.barrier()


def test_a_side_that_raises(comm, gpu, monkeypatch):
    try:
        if comm.rank < 2:
            device_channels.a_side_that_raises(comm, 1 - comm.rank, gpu, gpu.device, monkeypatch)
    finally:
        comm.barrier()


def test_memory_is_given_back(comm, gpu):
    """On both ranks, once both have closed a channel that has grown."""
    pool = gpu.cupy.get_default_memory_pool()

    def free():
        gc.collect()
        given_up.sweep()
        gpu.fetch(gpu.device.empty((1,), "float32"))
        return gpu.cupy.cuda.runtime.memGetInfo()[0] + pool.total_bytes()

    try:
        if comm.rank < 2:
            device_channels.memory_is_given_back(comm, 1 - comm.rank, gpu, gpu.device, free)
    finally:
        comm.barrier()


def test_a_stream_that_waits_in_vain(comm, gpu, monkeypatch):
    try:
        if comm.rank < 2 and comm.config.device_peers:
            device_channels.a_stream_that_waits_in_vain(comm, 1 - comm.rank, gpu, gpu.device, monkeypatch)
    finally:
        comm.barrier()


def test_a_failed_channel_lets_streams_go(comm, gpu, monkeypatch):
    try:
        if comm.rank < 2 and comm.config.device_peers:
            device_channels.a_failed_channel_lets_streams_go(comm, 1 - comm.rank, gpu, gpu.device, monkeypatch)
    finally:
        comm.barrier()
