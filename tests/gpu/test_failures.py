"""Failures of a rank's GPU: the others get an error that names the rank; a failed group releases its streams."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import commlib
from commlib.communicator import Communicator
from commlib.config.settings import Config
from commlib.errors import MismatchError, PeerError, UsageError
from commlib.runtime.process import Runtime
from commlib.transport.mpi import MpiTransport

pytestmark = pytest.mark.ranks(min=2)


@pytest.fixture(params=["peers", "staged"])
def failing(request: pytest.FixtureRequest, gpu) -> Iterator[Communicator]:
    """All ranks, in a group that may fail."""
    world = commlib.init()
    settings = Config(timeout=20, device_peers=request.param == "peers", device_slot_kib=256)
    runtime = Runtime(settings, world.runtime.ranks_on_node)
    yield Communicator(MpiTransport(world.native.Dup()), runtime, f"failing {request.param}")
    world.barrier()


def test_a_lost_gpu(failing, gpu, monkeypatch):
    """Its rank gets CUDA's error, and the others the rank and that error."""
    comm, runtime = failing, gpu.cupy.cuda.runtime
    x = gpu.put(np.ones(100_000, np.float32))
    comm.all_reduce(x)
    copy = runtime.memcpyAsync

    def lost(*args):
        raise RuntimeError("cudaErrorIllegalAddress: an illegal memory access was encountered")

    if comm.rank == 1:
        monkeypatch.setattr(runtime, "memcpyAsync", lost)
        with pytest.raises(RuntimeError, match="IllegalAddress"):
            comm.all_reduce(x)
        monkeypatch.setattr(runtime, "memcpyAsync", copy)
    else:
        with pytest.raises(PeerError, match=r"rank 1 has given up this group.*IllegalAddress|rank 1.*RuntimeError"):
            for _ in range(3):
                comm.all_reduce(x)
    gpu.fetch(x)  # no stream waits any more


def test_other_calls(failing, gpu):
    x = gpu.put(np.ones(1000 + failing.rank % 2, np.float32))
    with pytest.raises(MismatchError, match=r"all_reduce of 1001 x float32.*device=cuda"):
        failing.all_reduce(x)
    y = gpu.put(np.ones(1000, np.float32))
    np.testing.assert_array_equal(gpu.fetch(failing.all_reduce(y)), failing.size)
    failing.close()


def test_arrays_of_the_host_and_of_a_gpu(failing, gpu):
    on_host, on_gpu = np.ones(4, np.float32), gpu.put(np.ones(4, np.float32))
    with pytest.raises(UsageError, match="x is on cuda and out on host"):
        failing.all_reduce(on_gpu, out=on_host)
    with pytest.raises(MismatchError, match="device=cuda"):
        failing.all_reduce(on_gpu if failing.rank else on_host)
    failing.close()
