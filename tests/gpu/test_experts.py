"""Experts' rows on GPUs, between their memories and through the host: the same bits as the host's exchange."""

from __future__ import annotations

import gc
import resource
from typing import Any

import numpy as np
import pytest

from commlib.devices.arrays import as_contiguous
from commlib.devices.cuda import peers
from commlib.expert.dispatchers import dispatcher_over
from commlib.expert.placement import ExpertPlacement
from commlib.sharding.axis import ParallelAxis
from tests.bodies import device_experts
from tests.bodies.device_experts import EXPERTS, fetch, table
from tests.gpu.ways import EACH_WAY
from tests.unit.expert.test_exchange import assign


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_there_and_back(comm: Any, gpu: Any, dtype: str) -> None:
    device_experts.there_and_back(comm, gpu.put, dtype)


@pytest.mark.parametrize("body", device_experts.BODIES, ids=lambda body: body.__name__)
def test_body(comm: Any, gpu: Any, body: Any) -> None:
    body(comm, gpu.put)


@pytest.mark.ranks(min=2)
def test_ranks_that_disagree(comm: Any, gpu: Any) -> None:
    device_experts.ranks_that_disagree(comm, gpu.put)


@EACH_WAY
@pytest.mark.parametrize("calls", [300, pytest.param(1200, marks=pytest.mark.long)])
def test_nothing_grows(comm: Any, gpu: Any, calls: int) -> None:
    exchange = dispatcher_over(ParallelAxis(comm), ExpertPlacement.even(EXPERTS, comm.size))
    x, chosen = as_contiguous(gpu.put(np.ones((40, 64), np.float32)), "x"), table(comm, [40], 2)
    assigned, gates = assign(chosen), np.ones(80, np.float32)

    def free() -> Any:
        gc.collect()
        peers.sweep()
        fetch(x)
        return gpu.cupy.cuda.runtime.memGetInfo()[0] + gpu.cupy.get_default_memory_pool().total_bytes()

    before = pages = 0
    for step in range(calls):
        plan, rows, received_gates, _ = exchange.dispatch("one", assigned, x, gates)
        exchange.dispatch_back("one", plan, exchange.combine_back("one", plan, x), received_gates)
        y = exchange.combine("one", plan, rows, received_gates)
        if step == calls // 3:
            before, pages = free(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        if step % 20 == 0:
            fetch(y)  # the host does not run ahead for ever
    comm.barrier()
    assert before - free() <= 0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - pages < 64 << 10  # KiB
