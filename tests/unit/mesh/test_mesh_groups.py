"""Mesh: the communicators of axes and products, on ranks that are threads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commlib.config.settings import Config
from commlib.errors import MismatchError, StallError, UsageError
from commlib.mesh_groups import Mesh
from tests.bodies.loopback import run


def check_group(comm, group, expected):
    """The ranks of a group, in its order, and a sum over them."""
    assert (group.size, group.rank) == (len(expected), expected.index(comm.rank))
    assert tuple(group.all_gather(np.array([comm.rank])).tolist()) == expected
    assert group.all_reduce(np.array([2.0**comm.rank])).tolist() == [sum(2.0**rank for rank in expected)]


@settings(max_examples=12, deadline=None)
@given(
    sizes=st.sampled_from([(1,), (3,), (2, 2), (1, 3), (3, 2), (2, 1, 3), (2, 2, 2)]),
    nodes=st.integers(1, 4),
    data=st.data(),
)
def test_groups_are_those_of_the_shape(sizes, nodes, data):
    names = ("pp", "dp", "tp")[-len(sizes) :]
    products = data.draw(
        st.lists(st.lists(st.sampled_from(names), unique=True, min_size=2).map(tuple), max_size=2)
        if len(names) > 1
        else st.just([])
    )

    def check(comm):
        mesh = Mesh(ranks=comm, **dict(zip(names, sizes, strict=True)))
        assert mesh.axes == names
        for axes in (*names, *products):
            group = mesh[axes]
            assert mesh[axes] is group
            axes = (axes,) if isinstance(axes, str) else axes
            check_group(comm, group, mesh.shape.group(comm.rank, *axes))
            assert mesh.coordinate(*axes) == group.rank
            assert group.name == f"world.{'*'.join(axes)}"
        mesh.close()
        comm.barrier()

    size = int(np.prod(sizes))
    run(size, check, nodes=[rank // nodes for rank in range(size)])


def test_a_refactored_mesh_shares_communicators():
    def check(comm):
        mesh = Mesh(ranks=comm, dp=-1, tp=2)
        experts = mesh.refactor({"dp": {"edp": -1, "ep": 2}})
        assert experts.axes == ("edp", "ep", "tp")
        assert experts["tp"] is mesh["tp"] and experts["dp"] is mesh["dp"]
        assert experts["dp", "tp"] is mesh["dp", "tp"]
        check_group(comm, experts["ep"], experts.shape.group(comm.rank, "ep"))
        check_group(comm, experts["edp", "ep"], mesh.shape.group(comm.rank, "dp"))
        check_group(comm, experts["ep", "tp"], experts.shape.group(comm.rank, "ep", "tp"))
        with pytest.raises(UsageError, match="share a part of the mesh"):
            experts["dp", "ep"]
        other = mesh.refactor({("dp", "tp"): ("rows", "ep")}, ep=4)  # the same name, in another mesh
        assert (other["ep"].size, experts["ep"].size) == (4, 2)
        experts.close()
        check_group(comm, mesh["dp"], mesh.shape.group(comm.rank, "dp"))  # not closed with the other mesh
        mesh.close()
        with pytest.raises(UsageError, match="is closed"):
            other["tp"]

    run(4, check)


def test_names_of_axes_are_required():
    def check(comm):
        mesh = Mesh(ranks=comm, dp=-1, tp=2)
        experts = mesh.refactor({"dp": {"edp": -1, "ep": 1}})
        assert list(mesh) == ["dp", "tp"] and list(experts) == ["edp", "ep", "tp"]
        assert "dp" in experts and "ep" in experts and "ep" not in mesh and 0 not in mesh
        assert mesh[["tp"]] is mesh["tp"]  # type: ignore[index]
        wrong: tuple[tuple[Any, str], ...] = (
            ("ep", "has no axis 'ep'; it has dp, tp"),
            (0, "has no axis 0"),
            ((), "expected one axis or different ones, got none"),
            (("tp", "tp"), "got tp, tp"),
        )
        for axes, message in wrong:
            with pytest.raises(UsageError, match=message):
                mesh[axes]

    run(2, check)


def test_different_meshes_are_an_error():
    def check(comm):
        with pytest.raises(MismatchError) as caught:
            Mesh(ranks=comm, dp=4, tp=1) if comm.rank == 2 else Mesh(ranks=comm, dp=-1, tp=2)
        assert "ranks 0, 1, 3: Mesh(dp=2, tp=2)" in str(caught.value)
        assert "rank 2: Mesh(dp=4, tp=1)" in str(caught.value)
        mesh = Mesh(ranks=comm, dp=2, tp=2)  # the group is still in step
        with pytest.raises(MismatchError, match=r"Mesh\(a=2, b=1, tp=2; dp=2\)"):
            mesh.refactor({"dp": {"a": 1 + comm.rank % 2, "b": -1}})
        check_group(comm, mesh["dp"], mesh.shape.group(comm.rank, "dp"))

    run(4, check, nodes=[0, 0, 1, 1])


def test_wrong_sizes_on_one_rank_do_not_hang():
    """The others must not wait for it."""

    def check(comm):
        with pytest.raises(MismatchError, match=r"rank 1: .*3, but there are 2 ranks; with dp=-1 it would be 2"):
            Mesh(ranks=comm, dp=3 if comm.rank == 1 else 2)
        with pytest.raises(UsageError, match="with dp=-1 it would be 2"):
            Mesh(ranks=comm, dp=3)

    run(2, check)


def test_the_order_of_names_in_a_product_is_the_order_of_ranks():
    def check(comm):
        mesh = Mesh(ranks=comm, dp=2, tp=3)
        assert mesh["dp", "tp"] is not mesh["tp", "dp"]
        assert mesh["dp", "tp"].rank == comm.rank
        assert mesh["tp", "dp"].rank == mesh.coordinate("tp") * 2 + mesh.coordinate("dp")

    run(6, check)


def test_picture_and_repr_show_the_nodes():
    def check(comm):
        mesh = Mesh(ranks=comm, dp=2, tp=-1)
        return repr(mesh), mesh.picture(), mesh.shape.picture(ranks_per_node=2)

    for rank, (text, picture, expected) in enumerate(run(4, check, nodes=[0, 0, 1, 1])):
        assert picture == expected
        assert text == f"<Mesh(dp=2, tp=2) over world: rank {rank} at dp={rank // 2}, tp={rank % 2}>"


def test_a_with_block_closes_the_mesh():
    def check(comm):
        with Mesh(ranks=comm, dp=-1) as mesh:
            check_group(comm, mesh["dp"], (0, 1))
        for use in (lambda: mesh["dp"], lambda: mesh.refactor({"dp": {"a": -1}})):
            with pytest.raises(UsageError, match=r"Mesh\(dp=2\) over world is closed"):
                use()
        mesh.close()  # again: nothing

    run(2, check)


def test_an_exception_on_one_rank_leaves_the_with_block():
    """Closing is collective, and the other rank does not close."""

    def check(comm):
        if comm.rank == 0:
            with pytest.raises(ZeroDivisionError), Mesh(ranks=comm, dp=-1) as mesh:
                raise ZeroDivisionError
        else:
            mesh = Mesh(ranks=comm, dp=-1)
        assert comm.all_reduce(np.ones(1)).tolist() == [2.0]
        return mesh

    run(2, check)


def test_a_rank_that_does_not_close_is_named():
    def check(comm):
        mesh = Mesh(ranks=comm, dp=-1)
        if comm.rank == 0:
            with pytest.raises(StallError, match="barrier"):
                mesh.close()

    run(2, check, config=Config(timeout=1))


def test_a_product_on_one_rank_alone_does_not_hang():
    def check(comm):
        mesh = Mesh(ranks=comm, dp=-1, tp=1)
        if comm.rank == 0:
            with pytest.raises(StallError, match="rank 1"):
                mesh["dp", "tp"]

    run(2, check, config=Config(timeout=1))


def test_other_objects_are_refused():
    with pytest.raises(UsageError, match="Mesh: ranks is the int 3: expected a Communicator"):
        Mesh(ranks=3, dp=-1)  # type: ignore[arg-type]
