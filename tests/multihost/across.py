"""Checks that hold wherever the ranks are, run by all of them on several layouts of hosts; test_hosts.py starts it.

Not called test_*.py, because on one host there is nothing to test here.
"""

from __future__ import annotations

import itertools
import os
import random
import socket
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

from commlib import horovod as hvd
from commlib.compress import scheme_of
from commlib.compress.gradients import GradientCompression
from commlib.compress.scheme import BucketPart
from commlib.errors import MismatchError
from tests.bodies import checks
from tests.oracles.oracle import assert_same, combined

LAYOUT = [int(ranks) for ranks in os.environ["RANKS_PER_HOST"].split(",")]

# From each rank's number on its host, a communicator: (world, local rank) -> group. All ranks are in one.
GROUPS = {
    "world": lambda world, local: world,
    "hosts in turn": lambda world, local: world.split(0, local),
    "backwards": lambda world, local: world.split(0, -world.rank),
    "without rank 0": lambda world, local: world.split(int(world.rank == 0)),
    "one rank of each host": lambda world, local: world.split(local),
    "node": lambda world, local: world.node(),
}


@pytest.fixture(scope="session")
def names():
    """The host name of every rank."""
    return MPI.COMM_WORLD.allgather(socket.gethostname())


@pytest.fixture(scope="session", params=GROUPS)
def group(comm, names, request):
    return GROUPS[request.param](comm, names[: comm.rank].count(names[comm.rank]))


# Locations of ranks


def test_the_ranks_are_on_the_expected_hosts(names):
    assert names == [f"h{host}" for host, ranks in enumerate(LAYOUT) for _ in range(ranks)]


def test_node(comm, names):
    node = comm.node()
    assert not comm.one_node and node.one_node
    assert node.all_gather_object(comm.rank) == [rank for rank, name in enumerate(names) if name == names[comm.rank]]
    assert comm.node() is node


def test_a_groups_node_contains_its_ranks_on_this_host(group, names):
    hosts = group.all_gather_object(names[MPI.COMM_WORLD.rank])
    assert group.one_node == (len(set(hosts)) == 1)
    expected = [rank for rank, host in enumerate(hosts) if host == hosts[group.rank]]
    assert group.node().all_gather_object(group.rank) == expected


def bytes_sent():
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


def test_data_between_hosts_crosses_the_links(comm, names):
    """With any algorithm, all hosts but one must send their part of the sum, and as many must get the result."""
    x = np.ones(1 << 20, np.float32)
    before = bytes_sent()
    comm.all_reduce(x, out=x)
    comm.barrier()
    bytes_by_host = dict(comm.all_gather_object((names[comm.rank], bytes_sent() - before)))
    assert all(bytes_by_host.values()) and sum(bytes_by_host.values()) >= 2 * (len(LAYOUT) - 1) * x.nbytes


def test_within_a_host_nothing_crosses_the_links(comm):
    node = comm.node()
    x = node.empty(1 << 20)
    comm.barrier()
    before = bytes_sent()
    for _ in range(3):
        node.all_reduce(x, out=x)
    assert bytes_sent() - before < x.nbytes / 10
    comm.barrier()


# Every verb


def test_every_verb_in_every_group(group):
    for dtype, count in itertools.product(("float32", "float16", "bfloat16", "int64", "bool"), (0, 1, 4099)):
        checks.all_reduce(group, dtype, (count,))
        checks.reduce_scatter(group, dtype, (count,), "max")
        for root in range(group.size):
            checks.reduce(group, dtype, (count,), "min", root)
            checks.broadcast(group, dtype, (count,), root)
        checks.gather(group, dtype, (count,), root=group.size - 1)
        checks.scatter(group, dtype, (count,), root=group.size - 1)
        checks.all_gather(group, dtype, (count,))
        checks.all_to_all(group, dtype, (count,))
        checks.send_recv(group, dtype, (count,))
    checks.send_and_recv(group, "float32", (70_000,))
    checks.objects(group, root=group.size - 1)
    group.barrier()


def test_async_twins_in_every_group(group):
    checks.async_twins(group)


@pytest.mark.parametrize("group", ["world", "hosts in turn"], indirect=True)
def test_large_arrays(group):
    dtype, count = "float32", 1_000_003
    checks.all_reduce(group, dtype, (count,), "mean")
    checks.reduce_scatter(group, dtype, (count,))
    checks.reduce(group, dtype, (count,), "max", root=group.size - 1)
    checks.broadcast(group, dtype, (count,), root=group.size - 1)
    checks.all_gather(group, dtype, (count // 4,))
    checks.all_to_all(group, dtype, (count // 4,))


@pytest.mark.parametrize("dtype, op", [("float32", "sum"), ("bfloat16", "mean")])
def test_symmetric_arrays(group, dtype, op):
    for count in (0, 1, 700, 20_011, 200_003):
        x, out = group.empty(count, dtype), group.empty(count, dtype)
        xs = checks.inputs(group, dtype, (count,), op)
        x[...] = xs[group.rank]
        assert group.all_reduce(x, op, out=out) is out
        assert_same(out, combined(xs, op))
        assert_same(x, xs[group.rank])
        assert group.all_reduce_async(x, op, out=x).wait() is x
        assert_same(x, combined(xs, op))
        if count:
            plan = group.plan_all_reduce(x[1:], "max", out=x[1:])  # equal everywhere by now, so it stays the same
            plan()
            plan.start().wait()
            assert_same(x, combined(xs, op))


def test_results_are_the_same_on_all_ranks_to_the_last_bit(group):
    """For numbers whose sum depends on the order."""
    for dtype in ("float32", "float64"):
        for count in (3, 5000, 50_000):
            x = np.random.default_rng(group.rank).normal(size=count).astype(dtype)
            total = group.all_reduce(x)
            assert len(set(group.all_gather_object(total.tobytes()))) == 1
            assert group.all_reduce(x).tobytes() == total.tobytes()


def test_groups_that_share_ranks_and_links_at_once(comm, names):
    local = names[: comm.rank].count(names[comm.rank])
    groups = [make(comm, local) for make in GROUPS.values()]
    works = [
        group.all_reduce_async(np.full(count, float(comm.rank))) for count in (3, 3000, 200_000) for group in groups
    ]
    sums = [sum(group.all_gather_object(comm.rank)) for group in groups]
    for work, expected in zip(works, sums * 3, strict=True):
        assert (work.wait() == expected).all()


# Compressed gradients


@pytest.mark.parametrize("name", ["bf16", "int8", "topk:ratio=0.01", "powersgd:rank=4"])
def test_only_compressed_bytes_cross_the_links(comm, names, name):
    parts = [BucketPart("w", 0, (512, 600)), BucketPart("b", 512 * 600, (600,))]
    flags = parts[-1].stop
    compression = GradientCompression(comm, scheme_of(name))
    array = comm.empty(flags + 8)
    reduction = compression.reduction("bucket", array, parts, flags, "mean")
    for step in range(3):  # connects, and finds its buffers
        array[:flags] = np.random.default_rng(100 * step + comm.rank).standard_normal(flags, np.float32)
        array[flags:] = [comm.rank == 0, 0, 1, 0, 0, 0, 0, 0]
        mean = comm.all_reduce(array[:flags], "mean")
        comm.barrier()
        before = bytes_sent()
        reduction()
        comm.barrier()
        bytes_by_host = dict(comm.all_gather_object((names[comm.rank], bytes_sent() - before)))
        assert len(set(comm.all_gather_object(array.tobytes()))) == 1
        assert (array[flags:] > 0).tolist() == [True, False, True, False, False, False, False, False]
        if name in ("bf16", "int8") and step == 0:  # later steps include the residuals of earlier ones
            # Encoded twice: two halves of a unit of the greatest (int8) or of each (bf16) of up to 5 hosts' sums.
            error = np.abs(array[:flags] - mean).max()
            assert error < (np.abs(array[:flags]).max() + 5) * (1 / 127 if name == "int8" else 2**-8)
    least = 2 * (len(LAYOUT) - 1) * 4 * flags  # float32, over all hosts
    share = {"bf16": 0.5, "int8": 0.26, "topk:ratio=0.01": 0.04, "powersgd:rank=4": 0.03}[name]
    assert 0 < sum(bytes_by_host.values()) < (share + 0.02) * 1.1 * least  # headers of packets and acknowledgements
    assert 0 <= sum(comm.all_gather_object(reduction.sent_bytes)) < (share + 0.02) * least


# Ranks that disagree


def test_a_mismatch_across_hosts_names_the_ranks(comm):
    group, last = comm.split(0), comm.size - 1
    others = f"ranks {', '.join(map(str, range(last)))}" if last > 1 else "rank 0"
    for _ in range(2):
        with pytest.raises(MismatchError) as caught:
            group.all_reduce(np.ones(4 if comm.rank == last else 3))
        text = str(caught.value)
        assert f"{others}: all_reduce of 3 x float64" in text and f"rank {last}: all_reduce of 4 x float64" in text
        checks.all_reduce(group, "float32", (3000,))


# Named operations


def test_named_operations_in_any_order(comm, names):
    hvd.init()
    local = names[: comm.rank].count(names[comm.rank])
    assert (hvd.local_rank(), hvd.local_size()) == (local, names.count(names[comm.rank]))
    assert hvd.cross_size() == sum(ranks > local for ranks in LAYOUT)
    peers = [rank for rank, name in enumerate(names) if names[:rank].count(name) == local]
    assert hvd.cross_rank() == peers.index(comm.rank)
    arrays = {f"t{n}": np.full(1 + 97 * n, float(comm.rank + n)) for n in range(40)}
    for round_number in range(3):
        order = list(arrays)
        random.Random(10 * round_number + comm.rank).shuffle(order)
        works = [hvd.start_allreduce([arrays[name]], [arrays[name].copy()], name, op=hvd.Sum) for name in order]
        for name, work in zip(order, works, strict=True):
            assert (work.wait()[0] == sum(range(comm.size)) + comm.size * int(name[1:])).all()
    with pytest.raises(MismatchError, match="shape is"):
        x = np.ones(3 if comm.rank else 4)
        hvd.start_allreduce([x], [x], "bad").wait()
    assert hvd.allgather_object(comm.rank) == list(range(comm.size))
