"""Verbs in nodes and between them: every shape of cluster, one rail and several, all against numpy."""

from __future__ import annotations

import numpy as np
import pytest

from commlib.collectives import rails
from commlib.collectives.host import hierarchical
from commlib.config.settings import Config
from commlib.cost import model
from commlib.cost.chooser import Chooser
from commlib.cost.model import DEFAULT, ETHERNET, Machine
from commlib.errors import MismatchError, UsageError
from commlib.schedule import LinkCost
from tests.bodies import checks
from tests.bodies.loopback import run
from tests.oracles.oracle import assert_same, combined

# Even and uneven nodes, ranks numbered node by node or in turn, a node with one rank, more nodes than ranks on one.
CLUSTERS = [
    [0, 0, 1, 1],
    [0, 1, 0, 1],
    [0, 0, 0, 1, 1],
    [0, 1, 1, 1],
    [0, 1, 0, 2, 1],
    [0, 0, 1, 1, 2, 2],
    [1, 0, 0, 0, 1],
]
clusters = pytest.mark.parametrize("nodes", CLUSTERS, ids=lambda nodes: "".join(map(str, nodes)))


def everything(comm, dtype, count):
    for op in ("sum", "mean", "max"):
        checks.all_reduce(comm, dtype, (count,), op, "hierarchical")
    checks.reduce_scatter(comm, dtype, (count // 3, 3), "mean", "hierarchical")
    checks.all_gather(comm, dtype, (count // 3, 3), "hierarchical")
    checks.all_to_all(comm, dtype, (count // comm.size,), "hierarchical")
    for root in range(comm.size):
        checks.broadcast(comm, dtype, (count,), root, "hierarchical")
    comm.barrier()


@clusters
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64"])
@pytest.mark.parametrize("count", [0, 1, 7, 1000])
def test_small_arrays_go_through_one_rail(nodes, dtype, count):
    run(len(nodes), lambda comm: everything(comm, dtype, count), nodes=nodes)


@clusters
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_large_arrays_go_through_all_rails(nodes, dtype, monkeypatch):
    monkeypatch.setattr(rails, "RAIL_BYTES", 1000)
    run(len(nodes), lambda comm: everything(comm, dtype, 20_011), nodes=nodes)


@clusters
@pytest.mark.parametrize("network", [DEFAULT, ETHERNET], ids=["fabric", "ethernet"])
@pytest.mark.parametrize("count", [20_011, 130_000])
def test_an_all_reduce_is_split_into_parts(nodes, network, count, monkeypatch):
    """Parts of 5 to 10 KiB, some of one block and some of several, of ordinary and of symmetric arrays."""
    monkeypatch.setattr(rails, "RAIL_BYTES", 1000)
    monkeypatch.setattr(hierarchical, "PART_BYTES", 10_000)
    monkeypatch.setattr(model, "AT_ONCE", 4000)

    def check(comm):
        comm.runtime.chooser = Chooser(network)
        for op in ("sum", "mean"):
            for dtype in ("float32", "bfloat16"):
                checks.all_reduce(comm, dtype, (count,), op, "hierarchical")
        x = comm.empty(count)
        for _ in range(2):
            x[:] = np.arange(count) % 13 + comm.rank
            comm.all_reduce(x, out=x)
            assert (x == (np.arange(count) % 13) * comm.size + sum(range(comm.size))).all()

    run(len(nodes), check, nodes=nodes)


@clusters
def test_symmetric_arrays_match_numpy(nodes, monkeypatch):
    monkeypatch.setattr(rails, "RAIL_BYTES", 1000)

    def check(comm):
        for op in ("sum", "mean"):
            for dtype in ("float32", "bfloat16"):
                xs = checks.inputs(comm, dtype, (9001,), op)
                x, out = comm.empty(9001, dtype), comm.empty(9001, dtype)
                x[:] = xs[comm.rank]
                comm.all_reduce(x, op, out=out)
                assert_same(out, combined(xs, op))
                assert_same(x, xs[comm.rank])
                comm.all_reduce(x, op, out=x)
                assert_same(x, combined(xs, op))

    run(len(nodes), check, nodes=nodes)


def test_rails_run_no_algorithm_that_needs_chunks_of_one_size():
    """An all_to_all of small arrays among many nodes chose "bruck", for which the rails had no memory, and failed."""

    def check(comm):
        comm.runtime.chooser = Chooser(
            Machine(LinkCost(1.0, 0.0), LinkCost(1.0, 0.0), 0.0)
        )  # as few rounds as possible
        checks.all_to_all(comm, "float32", (3,), "hierarchical")

    run(8, check, nodes=[0, 0, 1, 1, 2, 2, 3, 3])


def test_the_bits_are_the_same_everywhere():
    terms = np.random.default_rng(0).normal(size=(5, 50_000)).astype(np.float32)

    def check(comm):
        return comm.all_reduce(terms[comm.rank], algorithm="hierarchical").tobytes()

    assert len(set(run(5, check, nodes=[0, 1, 0, 1, 1]))) == 1


def test_a_hierarchical_algorithm_needs_a_hierarchy():
    def check(comm):
        with pytest.raises(UsageError, match="on one node, has one rank on each"):
            comm.all_reduce(np.ones(3), algorithm="hierarchical")

    run(2, check)
    run(2, check, nodes=[0, 1])


def test_a_mismatch_within_a_node_reaches_other_nodes():
    """Ranks of a node see it at their board; a rank on another node only waits, and must be notified."""

    def check(comm):
        with pytest.raises(MismatchError, match=r"rank 1: all_reduce of 4 x"):
            comm.all_reduce(np.ones(4 if comm.rank == 1 else 3))

    run(4, check, nodes=[0, 0, 1, 1], config=Config(timeout=10, check_first=0))
