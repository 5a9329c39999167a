"""Memory growth: neither a GPU's memory nor the host's grows with calls and temporary arrays."""

from __future__ import annotations

import gc
import resource

import numpy as np
import pytest

from commlib.devices.cuda import peers
from tests.gpu.ways import EACH_WAY


def free(gpu):
    gc.collect()
    peers.sweep()
    gpu.fetch(gpu.device.empty((1,), "float32"))
    return gpu.cupy.cuda.runtime.memGetInfo()[0] + gpu.cupy.get_default_memory_pool().total_bytes()


@EACH_WAY
@pytest.mark.parametrize("calls", [300, pytest.param(1500, marks=pytest.mark.long)])
def test_calls(comm, gpu, calls):
    x, y = gpu.put(np.ones(1000, np.float32)), comm.empty((1000,), "float32", device=gpu.device)
    plan = comm.plan_all_reduce(y, "mean")
    before = pages = 0
    for step in range(calls):
        comm.all_reduce(x)
        comm.all_reduce_async(y, "max", out=y).wait()
        plan()
        comm.all_gather(x)
        if step == calls // 3:
            before, pages = free(gpu), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        if step % 100 == 0:
            gpu.fetch(x)  # the host does not run ahead for ever
    comm.barrier()
    assert before - free(gpu) <= 0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - pages < 64 << 10  # KiB


def test_symmetric_memory(comm, gpu):
    """It is freed when all ranks have dropped it, which is settled when the next one is allocated."""

    def make_and_drop(times):
        for _ in range(times):
            x = comm.empty((250_000,), "float32", device=gpu.device)
            comm.all_reduce(x, out=x)
            gpu.fetch(x)
            del x

    make_and_drop(2)
    comm.barrier()
    before = free(gpu)
    comm.barrier()
    make_and_drop(20)
    comm.barrier()
    after = free(gpu)
    comm.barrier()
    assert before - after <= 2_000_000 * comm.size  # on a single GPU, all ranks' memory, and two at a time at most
