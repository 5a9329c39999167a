"""Mesh over MPI: the groups of axes and products, shared by refactored meshes, closed and created again."""

from __future__ import annotations

import gc

import numpy as np
import pytest

import commlib
from commlib import MismatchError, UsageError
from tests.bodies import checks


def exercise(comm, group, expected):
    assert (group.size, group.rank) == (len(expected), expected.index(comm.rank))
    assert tuple(group.all_gather(np.array([comm.rank])).tolist()) == expected
    checks.all_reduce(group, "float32", (3000,), "mean")
    checks.send_recv(group, "int16", (5,))
    group.barrier()


def test_axes_and_products(comm):
    tp = 2 if comm.size % 2 == 0 else 1
    mesh = commlib.Mesh(pp=1, dp=-1, tp=tp)
    assert mesh.comm is comm and mesh.axes == ("pp", "dp", "tp")
    assert mesh.shape.size("dp") == comm.size // tp
    for axes in ("pp", "dp", "tp", ("dp", "tp"), ("tp", "dp"), ("pp", "tp")):
        names = (axes,) if isinstance(axes, str) else axes
        exercise(comm, mesh[axes], mesh.shape.group(comm.rank, *names))
        assert mesh.coordinate(*names) == mesh[axes].rank
    mesh.close()


def test_a_refactored_mesh(comm):
    with commlib.Mesh(dp=-1) as mesh, mesh.refactor({"dp": ("edp", "ep")}, edp=1) as experts:
        assert experts["dp"] is mesh["dp"]
        for axis in experts.shape.names:
            exercise(comm, experts[axis], experts.shape.group(comm.rank, axis))


def test_axes_work_at_the_same_time(comm):
    mesh = commlib.Mesh(dp=-1, tp=2 if comm.size == 4 else 1)
    works = [
        (mesh[axis].all_reduce_async(np.full(length, float(comm.rank))), axis)
        for length in (3, 30000)
        for axis in ("tp", "dp")
    ]
    for work, axis in works:
        assert set(work.wait().tolist()) == {float(sum(mesh.shape.group(comm.rank, axis)))}
    mesh.close()


@pytest.mark.any_ranks
def test_many_meshes_can_be_dropped(comm):
    """Groups that were not closed are freed at later collective calls: MPI has only a few thousand communicators."""
    for _ in range(20):
        mesh = commlib.Mesh(dp=-1, tp=1)
        assert mesh["dp"].all_reduce(np.ones(1)).tolist() == [comm.size]
        del mesh
        gc.collect()


@pytest.mark.ranks(min=2)
def test_ranks_that_request_different_meshes(comm):
    with pytest.raises(MismatchError) as caught:
        commlib.Mesh(dp=-1) if comm.rank else commlib.Mesh(tp=-1)
    assert f"rank 0: Mesh(tp={comm.size})" in str(caught.value)
    assert f"Mesh(dp={comm.size})" in str(caught.value)
    with pytest.raises(UsageError, match=f"there are {comm.size} ranks; with dp=-1 it would be {comm.size}"):
        commlib.Mesh(dp=100)
    with commlib.Mesh(dp=-1) as mesh:
        exercise(comm, mesh["dp"], tuple(range(comm.size)))


def test_a_mesh_of_a_mesh(comm):
    """A mesh over one group of another mesh."""
    with commlib.Mesh(dp=-1, tp=2 if comm.size == 4 else 1) as outer:
        inner = commlib.Mesh(ranks=outer["dp"], rows=-1, columns=1)
        assert inner["rows"].name == "world.dp.rows"
        exercise(outer["dp"], inner["rows"], tuple(range(outer["dp"].size)))
        inner.close()
