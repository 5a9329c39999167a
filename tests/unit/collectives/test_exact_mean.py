"""Means of 64-bit integers whose sum does not fit, by every verb, on every way. They wrapped around silently."""

from __future__ import annotations

import numpy as np
import pytest

from commlib.collectives import rails
from commlib.config.settings import Config
from commlib.errors import UsageError
from commlib.schedule import algorithms
from tests.bodies import loopback
from tests.late import LATE, OnDevice

CONFIG = Config(timeout=10, slot_kib=4, staging_kib=8)
CLUSTERS = {"a node": None, "nodes": [0, 1, 2, 3], "nodes of several": [0, 0, 1, 1]}


def values(dtype, rank, count):
    limits = np.iinfo(dtype)
    x = np.random.default_rng(rank).integers(limits.min, limits.max, count, dtype, endpoint=True)
    x[:4] = limits.max - rank, limits.min + rank, limits.max // 2 + rank, limits.min // 2 - 1 if limits.min else rank
    return x


def expected(dtype, size, count):
    columns = zip(*(values(dtype, rank, count).tolist() for rank in range(size)), strict=True)
    totals = [sum(column) for column in columns]
    return np.array([total // size if total >= 0 else -(-total // size) for total in totals], dtype)


def check_all(comm, dtype, count):
    rank, size = comm.rank, comm.size
    x, mean = values(dtype, rank, count), expected(dtype, size, count)
    assert (comm.all_reduce(x, "mean") == mean).all()
    assert (comm.all_reduce_async(x, "mean").wait() == mean).all()
    assert (comm.plan_all_reduce(x.copy(), "mean")() == mean).all()
    symmetric = comm.empty(count, dtype)
    symmetric[:] = x
    assert (comm.all_reduce(symmetric, "mean", out=symmetric) == mean).all()
    share = count // size
    assert (comm.reduce_scatter(x, "mean") == mean[rank * share :][:share]).all()
    lengths = [count - 3, 1, 0, 2]
    own = sum(lengths[:rank])
    assert (comm.reduce_scatter_v(x, lengths, "mean") == mean[own : own + lengths[rank]]).all()
    at_root = comm.reduce(x, "mean", root=1)
    assert rank != 1 or (at_root == mean).all()


@pytest.mark.parametrize("count", [8, 4000])
@pytest.mark.parametrize("dtype", ["int64", "uint64"])
@pytest.mark.parametrize("cluster", CLUSTERS)
def test_verbs_give_exact_means(cluster, dtype, count, monkeypatch):
    monkeypatch.setattr(rails, "RAIL_BYTES", 1)
    loopback.run(4, lambda comm: check_all(comm, dtype, count), nodes=CLUSTERS[cluster], config=CONFIG)


@pytest.mark.parametrize("dtype", ["int64", "uint64"])
def test_schedules_give_exact_means(dtype):
    def check(comm):
        for count in (4, 3000):
            x, mean = values(dtype, comm.rank, count), expected(dtype, comm.size, count)
            for name in algorithms("all_reduce"):
                assert (comm.all_reduce(x, "mean", algorithm=name) == mean).all(), name

    loopback.run(4, check, config=CONFIG)


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("devices", [(), ("late",)], ids=["staged", "direct"])
def test_device_arrays_have_exact_means(cluster, devices, monkeypatch):
    """Their means are taken on the host: a device's kernels add up in 64 bits."""
    monkeypatch.setattr(LATE, "has_signals", True)

    def check(comm):
        there = OnDevice(comm)
        with LATE.using(LATE.stream()):
            for count in (8, 4000):
                x, mean = values("int64", comm.rank, count), expected("int64", comm.size, count)
                assert (there.all_reduce(x, "mean") == mean).all()
                assert (there.reduce_scatter(x, "mean") == mean.reshape(comm.size, -1)[comm.rank]).all()
            with pytest.raises(UsageError, match=r"algorithm 'messages': the mean of int64 is computed on the host"):
                there.all_reduce(x, "mean", algorithm="messages")

    loopback.run(4, check, nodes=CLUSTERS[cluster], config=CONFIG, devices=devices)
