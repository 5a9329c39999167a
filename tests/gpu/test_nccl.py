"""NCCL between separate GPUs: every verb that it has, what it refuses, and who may choose it.

On a machine with one GPU its ranks share that, where NCCL_MULTI_RANK_GPU_ENABLE=1 and NCCL is new enough.
"""

from __future__ import annotations

import gc
import logging
import os

import numpy as np
import pytest

import commlib
from commlib.collectives.device import nccl_connection
from commlib.communicator import Communicator
from commlib.config.settings import Config
from commlib.devices.cuda.nccl import DTYPES as KNOWN
from commlib.devices.cuda.nccl import SHARES_GPUS, NcclRanks, library, place, unique_id
from commlib.dtypes import DTYPES, NUMPY, accumulator_dtype
from commlib.errors import ShutdownError, StallError, TransportError, UsageError
from commlib.runtime.process import Runtime
from commlib.transport.mpi import MpiTransport
from tests.bodies import checks
from tests.cuda import nccl_standin
from tests.late import OnDevice
from tests.oracles.oracle import REDUCIBLE

SHAPES = ((), (0,), (5, 3), (70_001,))


def group(gpu, **settings):
    """Return a new group of all ranks, whose GPUs have no peer access."""
    world = commlib.init()
    settings = {"timeout": 20.0, "device_peers": False, **settings}
    return Communicator(MpiTransport(world.native.Dup()), Runtime(Config(**settings), world.runtime.ranks_on_node))


@pytest.fixture(scope="module")
def comm(gpu):
    world = commlib.init()
    if gpu.is_real:
        places = world.native.allgather(place(gpu.device))
        shares = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1" and library().get_version() >= SHARES_GPUS
        if len(set(places)) < world.size and not shares:
            pytest.skip("NCCL wants a GPU for each rank, or NCCL_MULTI_RANK_GPU_ENABLE=1 and NCCL 2.30")
    nccl_standin.share_gpus(False)
    created = group(gpu)
    yield created
    created.close()
    nccl_standin.share_gpus(True)


@pytest.fixture
def on_gpu(comm, gpu):
    return OnDevice(comm, gpu)


def reducible(size):
    """Return the pairs of dtype and op that NCCL reduces among so many ranks as commlib promises."""
    return [
        (dtype, op)
        for dtype, op in REDUCIBLE
        if (dtype if size == 2 and op != "mean" else accumulator_dtype(dtype, op)) in KNOWN
    ]


def test_reductions(on_gpu, gpu):
    size = on_gpu.size
    for dtype, op in reducible(size):
        before = len(nccl_standin.calls)
        for shape in SHAPES:
            checks.all_reduce(on_gpu, dtype, shape, op, algorithm="nccl")
        checks.reduce(on_gpu, dtype, (70_001,), op, root=size - 1, algorithm="nccl")
        checks.reduce_scatter(on_gpu, dtype, (300 * size, 3), op, algorithm="nccl")
        assert gpu.is_real or len(nccl_standin.calls) > before
    assert {"float16", "bfloat16", "float32", "float64", "int8", "uint64"} <= {dtype for dtype, _ in reducible(size)}


@pytest.mark.parametrize("dtype", DTYPES)
def test_movement(on_gpu, dtype):
    """As bytes: any dtype."""
    for shape in SHAPES:
        checks.broadcast(on_gpu, dtype, shape, root=on_gpu.size - 1, algorithm="nccl")
        checks.all_gather(on_gpu, dtype, shape, algorithm="nccl")


def test_async_twins(comm, gpu):
    twins = OnDevice(checks.Twins(comm), gpu)
    checks.all_reduce(twins, "float32", (70_001,), algorithm="nccl")
    checks.broadcast(twins, "float32", (70_001,), root=0, algorithm="nccl")


def test_all_gather_in_place(comm, gpu):
    x = gpu.put(np.arange(6 * comm.size, dtype=np.int32) * (comm.rank + 1))
    comm.all_gather(x[6 * comm.rank : 6 * comm.rank + 6], out=x, algorithm="nccl")
    expected = [np.arange(6 * rank, 6 * rank + 6, dtype=np.int32) * (rank + 1) for rank in range(comm.size)]
    np.testing.assert_array_equal(gpu.fetch(x), np.concatenate(expected))


@pytest.mark.ranks(min=3)
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_half_precision_is_rounded_once(comm, gpu, op):
    """NCCL itself would round 2048 + 1 to 2048, in either direction."""
    x = gpu.put(np.full(700, 2048 if comm.rank == 1 else 1, np.float16))
    actual = gpu.fetch(comm.all_reduce(x, op, algorithm="nccl"))
    expected = np.float16((2047 + comm.size) / (comm.size if op == "mean" else 1))
    np.testing.assert_array_equal(actual, np.full(700, expected, np.float16))


def test_it_is_chosen_where_memory_is_not_shared(comm, gpu):
    """For all that it does as commlib promises, among several ranks; not for minima of floats, because of NaN."""
    if gpu.is_real:
        pytest.skip("only the stand-in counts calls")
    size = comm.size

    def used(call):
        before = len(nccl_standin.calls)
        call()
        return nccl_standin.calls[before:] != []

    x = gpu.put(np.ones((6 * size, 2), np.float32))
    for call in (
        lambda: comm.all_reduce(x),
        lambda: comm.reduce_scatter(x, "mean"),
        lambda: comm.all_gather(x),
        lambda: comm.broadcast(x),
        lambda: comm.reduce(x),
        lambda: comm.all_reduce(gpu.put(np.ones(700, np.int32)), "min"),
    ):
        assert used(call) is (size > 1)
    for call in (
        lambda: comm.all_reduce(x, "max"),
        lambda: comm.all_reduce(gpu.put(np.ones(700, np.int16))),
        lambda: comm.all_to_all(x),
        lambda: comm.all_reduce(x, algorithm="ring"),
        lambda: comm.all_reduce(np.ones(700, np.float32)),
        *([lambda: comm.reduce_scatter(gpu.put(np.ones((6 * size + 1, 2), np.float32)))] if size > 1 else []),
    ):
        assert not used(call)
    for settings in ({"device_peers": True}, {"nccl": False}):
        other = group(gpu, **settings)
        assert not used(lambda other=other: other.all_reduce(x))
        other.close()


@pytest.mark.parametrize(
    "dtype, call, reason",
    [
        ("complex64", lambda comm, x: comm.all_reduce(x, algorithm="nccl"), "it does not support sum of complex64"),
        ("uint8", lambda comm, x: comm.all_reduce(x, "and", algorithm="nccl"), "it does not support and of uint8"),
        ("bool", lambda comm, x: comm.all_reduce(x, algorithm="nccl"), "it does not support sum of bool"),
        ("float32", lambda comm, x: comm.all_to_all(x, algorithm="nccl"), "it supports only all_reduce, reduce"),
    ],
)
def test_unsupported_calls(comm, gpu, dtype, call, reason):
    x = gpu.put(np.ones((comm.size, 7), dtype))
    with pytest.raises(UsageError, match=f"algorithm 'nccl': {reason}"):
        call(comm, x)


def test_uneven_parts_are_refused(comm, gpu):
    x = gpu.put(np.ones((comm.size + 1, 7), np.float32))
    if comm.size > 1:
        with pytest.raises(UsageError, match=f"dimension 0, {comm.size + 1}, must be a multiple of {comm.size}"):
            comm.reduce_scatter(x, algorithm="nccl")


def test_arrays_of_the_host_are_refused(comm):
    with pytest.raises(UsageError, match="algorithm 'nccl': it supports only arrays on a GPU"):
        comm.all_reduce(np.ones(7), algorithm="nccl")


@pytest.fixture
def private(comm, gpu):
    """A group that detects NCCL by itself, on the stand-in."""
    if gpu.is_real:
        pytest.skip("only the stand-in can be broken")
    created = group(gpu)
    yield created
    created.close()
    nccl_standin.share_gpus(False)
    nccl_standin.broken.clear()


@pytest.mark.ranks(min=2)
def test_ranks_that_share_a_gpu_are_refused(private, gpu, monkeypatch):
    """Unless the user allows it; calls that do not name it take another path, and the group remains usable."""
    nccl_standin.share_gpus(True)
    x = gpu.put(np.full(700, 1.0, np.float32))
    for _ in range(2):
        with pytest.raises(UsageError, match=r"ranks 0-\d share the GPU 0000:00.*NCCL_MULTI_RANK_GPU_ENABLE=1"):
            private.all_reduce(x, algorithm="nccl")
        np.testing.assert_array_equal(gpu.fetch(private.all_reduce(x)), np.full(700, private.size, np.float32))
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    other = group(gpu)
    np.testing.assert_array_equal(gpu.fetch(other.all_reduce(x, algorithm="nccl")), np.full(700, other.size))
    other.close()


@pytest.mark.ranks(min=2)
def test_a_rank_without_nccl(private, gpu, monkeypatch):
    if private.rank == 1:
        monkeypatch.setattr(library(), "available", False)
    x = gpu.put(np.ones(700, np.float32))
    with pytest.raises(UsageError, match=r"algorithm 'nccl': CuPy finds no NCCL: .* \(rank 1\)"):
        private.all_reduce(x, algorithm="nccl")
    np.testing.assert_array_equal(gpu.fetch(private.all_reduce(x)), np.full(700, private.size, np.float32))


@pytest.mark.ranks(min=2)
def test_versions_that_differ(private, gpu, monkeypatch):
    monkeypatch.setattr(library(), "get_version", lambda: 22000 + private.rank)
    with pytest.raises(UsageError, match="must be the same on all ranks: 22000 on rank 0; 22001 on rank 1"):
        private.broadcast(gpu.put(np.ones(7)), algorithm="nccl")


@pytest.mark.ranks(min=2)
def test_a_rank_that_cannot_join(private, gpu, monkeypatch, caplog):
    """The others wait for it in NCCL, where nothing can interrupt them; but not for ever."""
    monkeypatch.setattr(nccl_connection, "SECONDS", 1.0)
    nccl_standin.broken.add(private.size - 1)
    x = gpu.put(np.full(700, 1.0, np.float32))
    with caplog.at_level(logging.WARNING, "commlib"):
        np.testing.assert_array_equal(gpu.fetch(private.all_reduce(x)), np.full(700, private.size, np.float32))
    if private.rank == 0:
        assert "NCCL is not used: rank 0: NCCL: not all of" in caplog.text and "unhandled system error" in caplog.text
    with pytest.raises(UsageError, match="unhandled system error; set NCCL_DEBUG=WARN for details"):
        private.all_reduce(x, algorithm="nccl")


def test_its_errors_become_commlibs(private, gpu, monkeypatch):
    x = gpu.put(np.ones(7))
    private.broadcast(x, algorithm="nccl")

    def fail(self, *arguments):
        raise nccl_standin.NcclError(5)

    monkeypatch.setattr(nccl_standin.NcclCommunicator, "check_async_error", fail)
    with pytest.raises(TransportError, match="NCCL: NcclError: NCCL_ERROR_INVALID_USAGE"):
        private.broadcast(x, algorithm="nccl")


@pytest.mark.ranks(min=2)
def test_subgroups_and_their_end(private, gpu):
    """Each group has a communicator of its own; a dropped one ends when the ranks next communicate."""
    destroyed = []
    destroy = nccl_standin.NcclCommunicator.destroy

    def counting(self):
        destroyed.append(self)
        destroy(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nccl_standin.NcclCommunicator, "destroy", counting)
        part = private.split(private.rank % 2)
        x = gpu.put(np.full(7, private.rank + 1.0))
        expected = sum(rank + 1.0 for rank in range(private.rank % 2, private.size, 2))
        np.testing.assert_array_equal(gpu.fetch(part.all_reduce(x, algorithm="nccl")), np.full(7, expected))
        part.close()
        assert len(destroyed) == 1
        part = private.split(0)
        part.all_reduce(x, algorithm="nccl")
        del part
        gc.collect()
        assert len(destroyed) == 1
        for _ in range(2):
            private.split(0).close()
        assert len(destroyed) == 2


@pytest.mark.ranks(min=2)
def test_a_stream_that_waits_for_ever_is_released(comm, gpu):
    """When the group has failed: rank 0 has queued a call that no other rank makes, and calls are not compared."""
    if gpu.is_real:
        pytest.skip("a GPU's kernel that waits for ever holds up the tests of others if this fails")
    alone = group(gpu, check="never")
    x = gpu.put(np.ones(7))
    alone.all_reduce(x, algorithm="nccl")
    if alone.rank == 0:
        work = alone.all_reduce_async(x, algorithm="nccl")
        work.wait()
        with pytest.raises(StallError):
            work.wait(0.2, host=True)
    alone.group.abandon("a test", KeyboardInterrupt())
    if alone.rank == 0:
        work.wait(10, host=True)
    with pytest.raises(ShutdownError):
        alone.all_reduce(x, algorithm="nccl")


def test_a_single_rank(gpu):
    """What a machine with one GPU can show of NCCL's own calls, whatever its ranks may share."""
    ranks = NcclRanks.join(gpu.device, 1, unique_id(), 0, "alone", lambda: None, 60.0)
    numbers = np.arange(70_001)
    try:
        for dtype in KNOWN:
            values = (numbers % 100).astype(NUMPY[dtype])
            x, y = gpu.put(values), gpu.put(values * 0)
            source, target = (gpu.device.wrap(array, "x") for array in (x, y))
            for move in (
                lambda x=source, y=target: ranks.all_reduce(x, y, "sum"),
                lambda x=source, y=target: ranks.reduce_scatter(x, y, "sum"),
                lambda x=source, y=target: ranks.reduce(x, y, "sum", 0),
                lambda x=source, y=target: ranks.all_gather(x, y),
            ):
                gpu.device.kernels.fill(target, 0)
                move()
                np.testing.assert_array_equal(gpu.fetch(y), values)
            ranks.broadcast(source, 0)
            np.testing.assert_array_equal(gpu.fetch(x), values)
    finally:
        ranks.close()
