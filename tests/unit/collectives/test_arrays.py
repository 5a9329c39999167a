"""Verbs take arrays contiguous or not, overlapping, read-only, of a wrong shape, and write the right memory."""

from __future__ import annotations

import logging
import re

import numpy as np
import pytest

from commlib.config.settings import Config
from commlib.errors import ShutdownError, UsageError
from commlib.horovod import Sum
from tests.bodies.loopback import run
from tests.oracles.oracle import assert_same, combined, values

LAYOUTS = pytest.mark.parametrize("nodes", [[0, 0, 0], [0, 0, 1]], ids=["one node", "two nodes"])
CONFIG = Config(timeout=5)
SIZE = 3


def strided(dtype, seed):
    """Return an array that is neither C- nor Fortran-contiguous, and the one around it."""
    around = values(dtype, (8, 10, 3), seed)
    return around[::2, 1:9:2, ::-1], around


@LAYOUTS
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool"])
def test_non_contiguous_arrays_are_read_and_written(nodes, dtype):
    def check(comm):
        inputs = [strided(dtype, seed)[0] for seed in range(SIZE)]
        x, _ = strided(dtype, comm.rank)
        out, around = strided(dtype, 9)
        original = around.copy()
        expected = combined(inputs, "sum")
        assert comm.all_reduce(x, out=out) is out
        assert_same(np.array(out), expected)
        assert_same(x, inputs[comm.rank])
        out[...] = 0
        original[::2, 1:9:2, ::-1] = 0
        assert_same(around, original)  # nothing around it was written
        assert comm.all_reduce(x, out=x) is x
        assert_same(x, expected)
        received, _ = strided(dtype, comm.rank)
        assert comm.broadcast(received, 1) is received
        assert_same(received, inputs[1])
        assert_same(comm.all_gather(np.asfortranarray(inputs[comm.rank])), np.concatenate(inputs))
        assert_same(comm.reduce_scatter(inputs[comm.rank]), np.array_split(expected, SIZE)[comm.rank])
        rows = inputs[comm.rank][:3]
        assert_same(comm.all_to_all(rows), np.stack([y[comm.rank] for y in inputs]))
        target, _ = strided(dtype, 9)
        right, left = (comm.rank + 1) % SIZE, (comm.rank - 1) % SIZE
        assert comm.send_recv(inputs[comm.rank], right, target, left) is target
        assert_same(target, inputs[left])

    run(SIZE, check, nodes=nodes, config=CONFIG)


@pytest.mark.parametrize("nodes, width", [([0, 0, 0], 50), ([0, 0, 1], 51)], ids=["one node", "two nodes"])
def test_staging_is_logged_once_at_debug_level(nodes, width, caplog):
    """Once for each kind of call in a process: a training loop makes it thousands of times. (All ranks are here.)"""

    def check(comm):
        x = np.ones((50, width), np.float32)
        comm.all_reduce(x)
        for _ in range(5):
            comm.all_reduce(x[::2])

    logging.getLogger("commlib").propagate = True
    with caplog.at_level(logging.DEBUG, "commlib"):
        run(SIZE, check, nodes=nodes, config=CONFIG)
    staged = [record for record in caplog.records if "staged" in record.getMessage()]
    assert 1 <= len(staged) <= SIZE  # threads may be between the look and the note
    for record in staged:
        assert record.levelno == logging.DEBUG
        assert "all_reduce" in record.getMessage() and f"(25, {width})" in record.getMessage()


@LAYOUTS
@pytest.mark.parametrize("length", [20, 5000])
@pytest.mark.parametrize("shift", [1, -1, 7])
def test_x_and_out_may_overlap(nodes, length, shift):
    def check(comm):
        memory = values("int32", length + 16, comm.rank)
        inputs = [values("int32", length + 16, rank)[8 : 8 + length] for rank in range(SIZE)]
        x, out = memory[8 : 8 + length], memory[8 + shift : 8 + shift + length]
        comm.all_reduce(x, out=out)
        assert_same(out, combined(inputs, "sum"))

    run(SIZE, check, nodes=nodes, config=CONFIG)


@LAYOUTS
def test_x_may_be_part_of_the_gathered_result(nodes):
    def check(comm):
        expected = np.concatenate([values("int32", 4, rank) for rank in range(SIZE)])
        for place in range(SIZE):  # place == rank is MPI's in-place; elsewhere, x is overwritten
            out = np.zeros(4 * SIZE, np.int32)
            x = out[4 * place : 4 * place + 4]
            x[:] = values("int32", 4, comm.rank)
            comm.all_gather(x, out=out)
            assert_same(out, expected)
        x = np.arange(SIZE * 2, dtype=np.int32) + 10 * comm.rank
        comm.all_to_all(x[:SIZE], out=x[1 : SIZE + 1])
        assert x[1 : SIZE + 1].tolist() == [comm.rank + 10 * rank for rank in range(SIZE)]

    run(SIZE, check, nodes=nodes, config=CONFIG)


WRITING = {
    "all_reduce": lambda comm, out: comm.all_reduce(np.ones(6), out=out),
    "all_reduce ring": lambda comm, out: comm.all_reduce(np.ones(6), out=out, algorithm="ring"),
    "reduce": lambda comm, out: comm.reduce(np.ones(6), root=comm.rank, out=out),
    "broadcast": lambda comm, out: comm.broadcast(out, (comm.rank + 1) % SIZE),
    "all_gather": lambda comm, out: comm.all_gather(np.ones(2), out=out),
    "gather": lambda comm, out: comm.gather(np.ones(2), root=comm.rank, out=out),
    "reduce_scatter": lambda comm, out: comm.reduce_scatter(np.ones(18), out=out),
    "all_to_all": lambda comm, out: comm.all_to_all(np.ones(6), out=out),
    "recv": lambda comm, out: comm.recv(out, 0),
    "send_recv": lambda comm, out: comm.send_recv(np.ones(6), 0, out, 0),
    "plan_all_reduce": lambda comm, out: comm.plan_all_reduce(np.ones(6), out=out),
}


@LAYOUTS
@pytest.mark.parametrize("verb", WRITING)
def test_read_only_results_are_refused(nodes, verb):
    def check(comm):
        out = np.zeros(6)
        out.flags.writeable = False
        with pytest.raises(UsageError, match=rf"{verb.split()[0].removeprefix('plan_')}.*read-only.*writable"):
            WRITING[verb](comm, out)
        comm.barrier()  # nothing was sent: the group stays usable

    run(SIZE, check, nodes=nodes, config=CONFIG)


@LAYOUTS
def test_an_array_made_read_only_later_is_refused(nodes):
    """The second call on the same array takes a short cut, which once did not check."""

    def check(comm):
        x = np.ones(6)
        comm.all_reduce(x, out=x)
        x.flags.writeable = False
        with pytest.raises(UsageError, match="read-only"):
            comm.all_reduce(x, out=x)
        assert (x == SIZE).all()

    run(SIZE, check, nodes=nodes, config=CONFIG)


@LAYOUTS
def test_an_array_may_change_between_calls(nodes):
    """The short cut identifies an array by its id: another array, dtype, operation or length is another call."""

    def check(comm):
        for length in range(1, 30):
            x = np.ones(length, np.float32)
            for _ in range(3):
                comm.all_reduce(x, "mean", out=x)
            assert (x == 1).all()
            comm.all_reduce(x, "sum", out=x)
            assert (x == SIZE).all()
            del x
        x = np.ones(4, np.float32)
        comm.all_reduce(x, out=x)
        x.shape = (2, 2)
        assert comm.all_reduce(x, out=x).shape == (2, 2)
        assert (x == SIZE**2).all()

    run(SIZE, check, nodes=nodes, config=CONFIG)


@LAYOUTS
@pytest.mark.parametrize("verb", [verb for verb in WRITING if verb not in ("broadcast", "recv", "send_recv")])
@pytest.mark.parametrize("out", [np.zeros(5), np.zeros((6, 1)), np.zeros(6, np.float32)], ids=["len", "ndim", "dtype"])
def test_results_of_the_wrong_shape_or_dtype_are_refused(nodes, verb, out):
    def check(comm):
        with pytest.raises(UsageError, match=r"out has shape .* and dtype .*; the result has shape \(6,\) .*float64"):
            WRITING[verb](comm, out.copy())
        comm.barrier()

    run(SIZE, check, nodes=nodes, config=CONFIG)


@LAYOUTS
@pytest.mark.parametrize("shape", [(3,), (2, 1)])
def test_scatter_into_a_wrong_result_does_not_hang(nodes, shape):
    """Only the root has the shape, so the error is detected after the ranks have synchronised."""

    def check(comm):
        x = np.arange(2.0 * SIZE) if comm.rank == 0 else None
        if comm.rank == 1:
            with pytest.raises(UsageError, match="out has shape"):
                comm.scatter(x, out=np.zeros(shape))
        else:
            assert comm.scatter(x).tolist() == [2.0 * comm.rank, 2.0 * comm.rank + 1]
        comm.barrier()

    run(SIZE, check, nodes=nodes, config=CONFIG)


@LAYOUTS
def test_a_plan_follows_its_memory(nodes):
    def check(comm):
        for length in (3, 5000):
            x, out = np.zeros(length, np.int64), np.zeros(length, np.int64)
            plan, in_place = comm.plan_all_reduce(x, out=out), comm.plan_all_reduce(x, "max", out=x)
            for step in range(3):
                x[:] = step + comm.rank
                assert plan() is out
                assert (out == 3 * step + 3).all()
                assert plan.start().wait() is out
                in_place()
                assert (x == step + 2).all()

    run(SIZE, check, nodes=nodes, config=CONFIG)


@LAYOUTS
def test_a_plan_on_overlapping_arrays_is_refused_or_follows_them(nodes):
    def check(comm):
        memory = np.arange(5.0)
        try:
            plan = comm.plan_all_reduce(memory[:-1], out=memory[1:])
        except UsageError:
            return
        memory[:] = 7
        plan()
        assert memory.tolist() == [7, 21, 21, 21, 21]

    run(SIZE, check, nodes=nodes, config=CONFIG)


@LAYOUTS
def test_a_plan_needs_contiguous_memory(nodes):
    def check(comm):
        with pytest.raises(UsageError, match=r"plan_all_reduce: x .*must be contiguous"):
            comm.plan_all_reduce(np.ones(6)[::2])
        with pytest.raises(UsageError, match=r"plan_all_reduce: .*out must be contiguous"):
            comm.plan_all_reduce(np.ones(3), out=np.ones(6)[::2])

    run(SIZE, check, nodes=nodes, config=CONFIG)


@LAYOUTS
def test_an_indivisible_dimension_0_is_refused(nodes):
    def check(comm):
        for verb in (comm.reduce_scatter, comm.all_to_all, comm.all_gather_v):
            with pytest.raises(UsageError, match=r"x is 0-dimensional.*reshape it to \(1,\)"):
                verb(np.array(1.0))
        with pytest.raises(UsageError, match="length 4, which is not a multiple of 3 ranks; use all_to_all_v"):
            comm.all_to_all(np.ones(4))
        with pytest.raises(UsageError, match="length 4, which 3 ranks cannot share evenly"):
            comm.scatter(np.ones(4), root=comm.rank)
        for splits in ([1, 1], [1, 1, 1], [5, -1, 0], [4, 0, 0, 0]):
            with pytest.raises(UsageError, match="3 lengths, none negative, that add up to 4"):
                comm.all_to_all_v(np.ones(4), splits)
        comm.barrier()

    run(SIZE, check, nodes=nodes, config=CONFIG)


@LAYOUTS
@pytest.mark.parametrize("root", [-1, SIZE])
def test_missing_roots_and_peers_are_refused(nodes, root):
    def check(comm):
        x = np.ones(3)
        for call in (comm.broadcast, comm.gather, comm.scatter, comm.reduce_root, comm.broadcast_object):
            with pytest.raises(UsageError, match=f"root is {root}, but world has the ranks 0 to 2"):
                call(x, root)
        for call in (comm.send, comm.recv):
            with pytest.raises(UsageError, match=f"peer is {root}, but world has the ranks 0 to 2"):
                call(x, root)
            with pytest.raises(UsageError, match=f"tag is {-1 if root < 0 else 32768}, expected 0 to 32767"):
                call(x, 0, -1 if root < 0 else 32768)

    def with_reduce(comm):
        comm.reduce_root = lambda x, root: comm.reduce(x, root=root)
        check(comm)

    run(SIZE, with_reduce, nodes=nodes, config=CONFIG)


@LAYOUTS
def test_a_closed_communicator(nodes):
    def check(comm):
        with comm.split(0) as group:
            assert repr(group) == f"<Communicator {group.name}: rank {comm.rank} of {SIZE}>"
        assert repr(group) == f"<Communicator {group.name}: rank {comm.rank} of {SIZE}, closed>"
        for call in (lambda: group.all_reduce(np.ones(2)), group.barrier, lambda: group.split(0)):
            with pytest.raises(ShutdownError, match=re.escape(f"{group.name} is closed, by close()")):
                call()

    run(SIZE, check, nodes=nodes, config=CONFIG)


@LAYOUTS
def test_unknown_operations_algorithms_and_dtypes_are_refused(nodes):
    def check(comm):
        with pytest.raises(UsageError, match="unknown operation 'avg'; known are sum, mean, min, max, prod"):
            comm.all_reduce(np.ones(3), "avg")
        for x, text in (
            (np.ones(3), "for integers, not for float64"),
            (np.ones(3, bool), r"for bool pass 'max' \(any\)"),
        ):
            with pytest.raises(UsageError, match=text):
                comm.all_reduce(x, "or")
        with pytest.raises(UsageError, match=r"ReduceOp.SUM: 1> is for operations by name.*: pass 'sum'"):
            comm.all_reduce(np.ones(3), Sum)
        with pytest.raises(UsageError, match=r"no algorithm 'rign'; known are .*ring"):
            comm.all_reduce(np.ones(3), algorithm="rign")
        with pytest.raises(UsageError, match=r"native.*needs MPI"):
            comm.all_reduce(np.ones(3), algorithm="native")
        for x in (np.array(["a"]), np.array([None]), np.ones(2, ">f4"), np.ones(2, "datetime64[s]")):
            with pytest.raises(UsageError, match=r"all_reduce: x: dtype .* is not supported; supported are float16"):
                comm.all_reduce(x)
        for value in (None, 1.0, [1.0], "text", object()):
            with pytest.raises(UsageError, match=r"all_reduce: x is a .*: expected an array.*numpy.array\(value\)"):
                comm.all_reduce(value)
        comm.barrier()

    run(SIZE, check, nodes=nodes, config=CONFIG)
