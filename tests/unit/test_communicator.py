"""Every verb, dtype, operation and algorithm, on one node and on several."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commlib.config.settings import Config
from commlib.dtypes import DTYPES, NUMPY, kernel_operation
from commlib.errors import ShutdownError, UsageError
from commlib.kernels.reductions import reduction
from commlib.schedule import algorithms
from tests.bodies import checks
from tests.bodies.loopback import run
from tests.oracles.oracle import REDUCIBLE

# Ranks, and the node of each.
ONE_NODE = [[0] * size for size in range(1, 6)]
LAYOUTS = [*ONE_NODE, [0, 1], [0, 0, 1], [0, 0, 1, 1], [0, 1, 0, 1, 2]]
# 1 KiB slots: even small arrays go through the node kernels in many pieces.
CONFIG = Config(timeout=10, slot_kib=1)
FEW = ("float32", "bfloat16", "int8", "bool", "complex64")

layouts = pytest.mark.parametrize("nodes", LAYOUTS, ids=lambda nodes: "".join(map(str, nodes)))


def each(verb: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("algorithm", algorithms(verb))


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """Compile all reductions here: on a fresh machine it takes longer than ranks are given to end."""
    for dtype, op in REDUCIBLE:
        reduction(dtype, kernel_operation(dtype, op))


def spread(nodes: list[int], function: Any) -> None:
    run(len(nodes), function, nodes=nodes, config=CONFIG)


@layouts
def test_all_reduce_supports_every_dtype(nodes):
    def check(comm):
        for dtype, op in REDUCIBLE:
            for shape in ((0,), (3, 4), (4500 // NUMPY[dtype].itemsize,)):  # the last in five pieces
                checks.all_reduce(comm, dtype, shape, op)

    spread(nodes, check)


@layouts
def test_other_reductions_support_every_dtype(nodes):
    def check(comm):
        for dtype, op in REDUCIBLE:
            checks.reduce_scatter(comm, dtype, (7, 3), op)
            checks.reduce_scatter_v(comm, dtype, [(3 * rank + 2) % 5 for rank in range(comm.size)], (3,), op)
            if op != "mean":
                checks.scan(comm, dtype, (7, 3), op)
            checks.reduce(comm, dtype, (7, 3), op, root=comm.size - 1)

    spread(nodes, check)


@layouts
def test_movement_supports_every_dtype(nodes):
    def check(comm):
        size = comm.size
        for dtype in DTYPES:
            checks.broadcast(comm, dtype, (4, 3), root=size - 1)
            checks.all_gather(comm, dtype, (4, 3))
            checks.gather(comm, dtype, (4, 3), root=size - 1)
            checks.scatter(comm, dtype, (4, 3), root=size - 1)
            checks.all_to_all(comm, dtype, (4, 3))
            checks.all_gather_v(comm, dtype, list(range(size)), (2,))
            checks.all_to_all_v(comm, dtype, [[(a * b + 1) % 4 for b in range(size)] for a in range(size)], (2,))
            checks.send_recv(comm, dtype, (4, 3))
            checks.send_and_recv(comm, dtype, (4, 3), tag=7)

    spread(nodes, check)


@layouts
@each("all_reduce")
def test_all_reduce_algorithms_match_numpy(nodes, algorithm):
    def check(comm):
        for dtype, op in REDUCIBLE:
            if dtype in FEW:
                checks.all_reduce(comm, dtype, (37,), op, algorithm)
        for shape in ((), (0,), (1,), (3, 0), (3000,)):
            checks.all_reduce(comm, "float16", shape, "mean", algorithm)

    spread(nodes, check)


@pytest.mark.parametrize("size", range(1, 6))
def test_all_reduce_on_the_node_can_be_named(size):
    def check(comm):
        for dtype, op in REDUCIBLE:
            checks.all_reduce(comm, dtype, (600,), op, "node")

    run(size, check, config=CONFIG)


def test_node_algorithm_is_refused_across_nodes():
    with pytest.raises(UsageError, match=r"all_reduce.*'node'.*no shared memory"):
        run(2, lambda comm: checks.all_reduce(comm, "float32", (3,), algorithm="node"), nodes=[0, 1])


@layouts
@each("reduce_scatter")
def test_reduce_scatter_algorithms_match_numpy(nodes, algorithm):
    def check(comm):
        for dtype in FEW:
            for shape in ((0,), (1,), (7, 3), (3000,), (5, 0)):
                checks.reduce_scatter(comm, dtype, shape, "sum", algorithm)

    spread(nodes, check)


@layouts
@pytest.mark.parametrize("verb", ["broadcast", "reduce", "gather", "scatter"])
def test_rooted_algorithms_work_from_every_root(nodes, verb):
    def check(comm):
        for algorithm in algorithms(verb):
            for root in range(comm.size):
                for shape in ((0,), (1,), (5, 3), (70000,)):
                    getattr(checks, verb)(comm, "int16", shape, root=root, algorithm=algorithm)

    spread(nodes, check)


@layouts
@pytest.mark.parametrize("verb", ["all_gather", "all_to_all"])
def test_unrooted_movement_algorithms_match_numpy(nodes, verb):
    def check(comm):
        for algorithm in ("auto", *algorithms(verb)):
            for dtype in FEW:
                for shape in ((0,), (1,), (5, 3), (3000,)):
                    getattr(checks, verb)(comm, dtype, shape, algorithm=algorithm)

    spread(nodes, check)


@layouts
def test_async_twins_match(nodes):
    spread(nodes, checks.async_twins)


@layouts
def test_verbs_accept_0d_arrays(nodes):
    def check(comm):
        for dtype in DTYPES:
            checks.all_reduce(comm, dtype, ())
            checks.reduce(comm, dtype, ())
            checks.broadcast(comm, dtype, ())
            checks.all_gather(comm, dtype, ())
            checks.gather(comm, dtype, ())
            checks.send_recv(comm, dtype, ())

    spread(nodes, check)


@layouts
def test_objects_are_sent(nodes):
    def check(comm):
        for root in range(comm.size):
            checks.objects(comm, root)

    spread(nodes, check)


@pytest.mark.parametrize("setting", [{"check": "never"}, {"check": "always"}, {"node_path": False}], ids=str)
def test_settings_do_not_change_results(setting):
    def check(comm):
        checks.all_reduce(comm, "bfloat16", (5000,), "mean")
        checks.all_to_all(comm, "int32", (2, 3))
        comm.barrier()
        checks.objects(comm)

    for nodes in ([0, 0, 0], [0, 0, 1]):
        run(3, check, nodes=nodes, config=Config(timeout=10, **setting))


@settings(max_examples=60, deadline=None)
@given(
    nodes=st.lists(st.integers(0, 2), min_size=1, max_size=5),
    shape=st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple),
    case=st.sampled_from(REDUCIBLE),
    data=st.data(),
)
def test_verbs_accept_any_shape_root_and_split(nodes, shape, case, data):
    size = len(nodes)
    root = data.draw(st.integers(0, size - 1), "root")
    dtype, op = case
    lengths = st.lists(st.integers(0, 6), min_size=size, max_size=size)
    gathered, splits = data.draw(lengths, "lengths"), [data.draw(lengths, "splits") for _ in range(size)]

    def check(comm):
        checks.all_reduce(comm, dtype, shape, op)
        checks.reduce_scatter(comm, dtype, shape, op)
        checks.reduce(comm, dtype, shape, op, root)
        checks.broadcast(comm, dtype, shape, root)
        checks.all_gather(comm, dtype, shape)
        checks.gather(comm, dtype, shape, root)
        checks.scatter(comm, dtype, shape, root)
        checks.all_to_all(comm, dtype, shape)
        checks.all_gather_v(comm, dtype, gathered, shape[1:])
        checks.all_to_all_v(comm, dtype, splits, shape[1:])
        checks.send_recv(comm, dtype, shape)

    run(size, check, nodes=nodes, config=CONFIG)


ONE = np.ones(1)


def test_a_communicator_in_a_with_block_is_closed_at_its_end() -> None:
    def rank(comm: Any) -> None:
        with comm.split(0) as group:
            assert group.all_reduce(ONE) == comm.size
        with pytest.raises(ShutdownError):
            group.all_reduce(ONE)
        with pytest.raises(ValueError, match="mine"), comm.split(0) as group:
            raise ValueError("mine")
        assert group.all_reduce(ONE) == comm.size  # the others may not have closed it

    run(2, rank)
