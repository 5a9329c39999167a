"""Symmetric buffers in shared memory."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from commlib.devices.host import HOST
from commlib.dtypes import DTYPES, numpy_dtype
from commlib.errors import UsageError
from commlib.kernels.host.node import TILE_BYTES
from tests.bodies import checks
from tests.oracles.oracle import assert_same, combined
from tests.oracles.reducible import pairs


@pairs()
def test_all_reduce_of_symmetric_arrays(comm, dtype, op):
    for shape in ((0,), (7,), (33, 41), (20_011,)):
        x, out = comm.empty(shape, dtype), comm.empty(shape, dtype)
        xs = checks.inputs(comm, dtype, shape, op)
        x[...] = xs[comm.rank]
        assert comm.all_reduce(x, op, out=out) is out
        assert_same(out, combined(xs, op))
        assert_same(x, xs[comm.rank])
        assert_same(comm.all_reduce(x, op), combined(xs, op))  # into an ordinary array
        assert comm.all_reduce(x, op, out=x) is x
        assert_same(x, combined(xs, op))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("count", [200_003, 4 * TILE_BYTES])
def test_large_buffers_are_correct_in_both_directions(comm, dtype, count):
    """A share of several tiles is swept forwards and backwards in turn; the last tile is a short one or a whole one."""
    dtype = numpy_dtype(dtype)
    x, out = comm.empty(count, dtype), comm.empty(count, dtype)
    pattern = (np.arange(count) % 13).astype(dtype)
    for call in range(3):
        x[:] = pattern + dtype.type(comm.rank + call)
        comm.all_reduce(x, out=x)
        comm.all_reduce(x, "max", out=out)
        expected = pattern.astype(np.float32) * comm.size + sum(range(comm.size)) + call * comm.size
        assert (x == expected.astype(dtype)).all()
        assert (out == x).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_empty_is_zeroed_aligned_and_of_the_requested_shape(comm, dtype):
    for shape in ((), (0,), 5, (3, 0, 2), (64, 3)):
        x = comm.empty(shape, dtype)
        assert x.shape == ((shape,) if isinstance(shape, int) else shape)
        assert x.flags.c_contiguous and x.flags.writeable and not x.astype(bool).any()
        assert x.size == 0 or x.ctypes.data % 64 == 0


def test_negative_shapes_are_refused(comm):
    with pytest.raises(UsageError, match="negative"):
        comm.empty((3, -1))


def test_only_the_owner_writes_its_memory(comm):
    x = comm.empty(10_000)
    x[:] = comm.rank
    comm.barrier()
    assert (x == comm.rank).all()


def test_views_of_symmetric_arrays(comm):
    """A bucket's slices, reshaped and async, at different offsets of one buffer."""
    bucket = comm.empty(50_000)
    bucket[:] = 1
    parts = bucket[:20_000], bucket[20_000:].reshape(100, 300)
    works = [comm.all_reduce_async(part, out=part) for part in parts]
    for work in works:
        work.wait()
    assert (bucket == comm.size).all()
    comm.all_reduce(bucket[1:], "max", out=bucket[:-1])  # overlapping
    assert (bucket == comm.size).all()


def test_a_view_keeps_the_memory_alive(comm):
    view = comm.empty(5000)[1000:2000]
    view[:] = comm.rank
    gc.collect()
    others = [comm.empty(5000) for _ in range(3)]  # a later call would give the memory back
    for other in others:
        other[:] = -1
    assert (view == comm.rank).all()
    comm.all_reduce(view, out=view)
    assert (view == sum(range(comm.size))).all()


def test_memory_is_freed_once_all_ranks_have_dropped_it(comm):
    def segments():
        return len(comm.group.symmetric_on(HOST))

    comm.empty(1)
    gc.collect()
    comm.empty(1)
    before = segments()
    last_array = comm.empty(5000) if comm.rank == comm.size - 1 else comm.empty(5000)[:0].copy()
    gc.collect()
    comm.empty(1)
    assert segments() == before + 1  # the last rank still has it
    del last_array
    gc.collect()
    comm.empty(1)
    assert segments() == before


def test_an_array_outlives_its_group(comm):
    group = comm.split(0)
    x = group.empty(100_000)
    x[:] = comm.rank
    group.close()
    x += 1
    assert (x == comm.rank + 1).all()


def test_many_allocations(comm):
    for step in range(60):
        x = comm.empty(3000, "int64")
        x[:] = step
        comm.all_reduce(x, out=x)
        assert (x == step * comm.size).all()


def test_symmetric_arrays_in_the_other_verbs(comm):
    x, everything = comm.empty(900, "int32"), comm.empty((comm.size * 900), "int32")
    x[:] = comm.rank
    comm.all_gather(x, out=everything)
    assert (everything == np.repeat(np.arange(comm.size), 900)).all()
    comm.broadcast(x, comm.size - 1)
    assert (x == comm.size - 1).all()
    assert (comm.reduce_scatter(everything) == np.array_split(everything * comm.size, comm.size)[comm.rank]).all()


@pytest.mark.parametrize("dtype", ["uint8", "float32"])
@pytest.mark.parametrize("count", [4097, 70_001, 3 * TILE_BYTES + 5])
def test_all_ranks_help_to_broadcast(comm, dtype, count):
    """Each copies its share of the root's array to all, from every root, and again from the same place."""
    x, beyond = comm.empty(count + 64, dtype)[:count], comm.empty(1)
    for root in (*range(comm.size), 0):
        x[:] = np.arange(count) % 7 + comm.rank + root
        assert comm.broadcast(x, root) is x
        assert (x == np.arange(count) % 7 + 2 * root).all()
    part = x[3 : count - 1]  # not at a cache line
    part[:] = comm.rank
    comm.broadcast(part, comm.size - 1)
    assert (part == comm.size - 1).all()
    assert (x[:3] == np.arange(3)).all() and not beyond.any()


@pytest.mark.ranks(min=2)
def test_each_group_has_its_own_symmetric_memory(comm):
    group = comm.split(comm.rank % 2)
    x = group.empty(5000)
    x[:] = comm.rank
    group.all_reduce(x, out=x)
    assert (x == sum(range(comm.rank % 2, comm.size, 2))).all()
    x[:] = 1
    comm.all_reduce(x, out=x)  # ordinary memory to the world
    assert (x == comm.size).all()
