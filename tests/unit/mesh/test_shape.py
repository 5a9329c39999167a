"""MeshShape: ranks and coordinates, groups of axes and products, refactoring, and suggestions of errors."""

from __future__ import annotations

from itertools import permutations
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commlib.errors import UsageError
from commlib.mesh import MeshShape

NAMES = ("pp", "dp", "cp", "tp")


@st.composite
def shapes(draw: st.DrawFn) -> MeshShape:
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    return MeshShape.of(dict(zip(NAMES, sizes, strict=False)), prod(sizes))


def as_array(mesh: MeshShape) -> np.ndarray[Any, Any]:
    """The oracle: the ranks as an array with a dimension for each axis."""
    return np.arange(mesh.ranks).reshape([mesh.size(axis) for axis in mesh.axes])


@given(shapes())
def test_coordinates_match_numpy(mesh: MeshShape) -> None:
    for rank in range(mesh.ranks):
        expected = dict(zip(mesh.axes, map(int, np.argwhere(as_array(mesh) == rank)[0]), strict=True))
        assert mesh.coordinates(rank) == expected
        assert mesh.rank_at(**expected) == rank
        assert [mesh.coordinate(rank, axis) for axis in mesh.axes] == list(expected.values())


@given(shapes(), st.data())
def test_groups_of_any_product_are_rows_of_a_transposed_array(mesh: MeshShape, data: st.DataObject) -> None:
    chosen = data.draw(st.sampled_from([p for n in range(1, 5) for p in permutations(mesh.axes, n)]))
    rest = [axis for axis in mesh.axes if axis not in chosen]
    order = [mesh.axes.index(axis) for axis in (*rest, *chosen)]
    rows = as_array(mesh).transpose(order).reshape(-1, mesh.size(*chosen)).tolist()
    assert mesh.groups(*chosen) == tuple(sorted(map(tuple, rows), key=min))
    for group in mesh.groups(*chosen):
        for place, rank in enumerate(group):
            assert mesh.group(rank, *chosen) == group
            assert mesh.coordinate(rank, *chosen) == place
            assert mesh.first(rank, *chosen) == min(group)


@given(shapes())
def test_every_axis_partitions_the_ranks(mesh: MeshShape) -> None:
    for axis in mesh.axes:
        groups = mesh.groups(axis)
        assert sorted(rank for group in groups for rank in group) == list(range(mesh.ranks))
        assert {len(group) for group in groups} == {mesh.size(axis)}


@given(shapes(), st.data())
def test_groups_of_a_product_are_unions_of_groups_of_its_parts(mesh: MeshShape, data: st.DataObject) -> None:
    chosen = data.draw(st.lists(st.sampled_from(mesh.axes), unique=True, min_size=1))
    for whole in mesh.groups(*chosen):
        for axis in chosen:
            parts = [group for group in mesh.groups(axis) if set(group) & set(whole)]
            assert sorted(rank for part in parts for rank in part) == sorted(whole)


@given(shapes(), st.data())
def test_one_size_is_inferred(mesh: MeshShape, data: st.DataObject) -> None:
    missing = data.draw(st.sampled_from(mesh.axes))
    sizes = [(axis, -1 if axis == missing else mesh.size(axis)) for axis in mesh.axes]
    assert MeshShape.of(sizes, mesh.ranks) == mesh == MeshShape.of(dict(sizes), mesh.ranks)


@st.composite
def refactored(draw: st.DrawFn) -> tuple[MeshShape, tuple[str, ...], MeshShape]:
    mesh = draw(shapes())
    start = draw(st.integers(0, len(mesh.axes) - 1))
    old = mesh.axes[start : draw(st.integers(start + 1, len(mesh.axes)))]
    total = mesh.size(*old)
    first = draw(st.sampled_from([n for n in range(1, total + 1) if total % n == 0]))
    return mesh, old, mesh.refactor({old: {"x": first, "y": -1}})


@given(refactored())
def test_refactoring_keeps_the_order_of_ranks(case: tuple[MeshShape, tuple[str, ...], MeshShape]) -> None:
    mesh, old, new = case
    assert new.groups("x", "y") == mesh.groups(*old) == new.groups(*old)
    assert new.size("x") * new.size("y") == mesh.size(*old)
    for axis in mesh.axes:  # old names keep their meaning
        assert new.groups(axis) == mesh.groups(axis)
    for rank in range(mesh.ranks):
        assert new.rank_at(**new.coordinates(rank)) == rank == new.rank_at(**mesh.coordinates(rank))


@given(refactored())
def test_old_and_new_axes_of_one_part_have_no_product(case: tuple[MeshShape, tuple[str, ...], MeshShape]) -> None:
    _, old, new = case
    for axis in new.names:
        if axis in old:
            with pytest.raises(UsageError, match="share a part of the mesh"):
                new.size("x", axis)
        elif axis != "x":
            assert new.size(axis, "x") == new.size(axis) * new.size("x")


def test_a_refactoring_can_be_written_in_three_ways() -> None:
    mesh = MeshShape.of({"pp": 2, "dp": 8, "tp": 2}, 32)
    refactored_mesh = mesh.refactor({"dp": {"edp": -1, "ep": 4}})
    assert refactored_mesh.axes == ("pp", "edp", "ep", "tp") and refactored_mesh.names == (
        "pp",
        "edp",
        "ep",
        "tp",
        "dp",
    )
    assert refactored_mesh == mesh.refactor({"dp": {"edp": 2, "ep": 4}}) == mesh.refactor({"dp": ("edp", "ep")}, ep=4)
    assert str(refactored_mesh) == "Mesh(pp=2, edp=2, ep=4, tp=2; dp=8)"


def test_experts_can_span_data_and_tensor_ranks() -> None:
    """If ep is no multiple of tp, the expert axes are another factorisation of the same ranks, not a finer one."""
    mesh = MeshShape.of({"dp": 3, "tp": 4}, 12).refactor({("dp", "tp"): {"edp": 2, "ep": 6}})
    assert mesh.groups("ep") == (tuple(range(6)), tuple(range(6, 12)))
    assert mesh.groups("tp")[1] == (4, 5, 6, 7)
    with pytest.raises(UsageError, match="ep and tp share"):
        mesh.size("ep", "tp")


def test_independent_refactorings_combine() -> None:
    mesh = MeshShape.of({"dp": 4, "tp": 4}, 16).refactor({"dp": ("edp", "ep")}, ep=2).refactor({"tp": {"a": 2, "b": 2}})
    assert mesh.axes == ("edp", "ep", "a", "b")
    assert mesh.size("dp", "b") == 8 and mesh.size("ep", "tp") == 8 and mesh.groups("dp", "tp") == (tuple(range(16)),)
    both = MeshShape.of({"dp": 4, "tp": 4}, 16).refactor({"dp": {"edp": 2, "ep": 2}, "tp": {"a": 2, "b": 2}})
    assert both.axes == mesh.axes


def test_an_axis_may_have_one_rank() -> None:
    mesh = MeshShape.of({"pp": 1, "dp": -1, "tp": 1}, 3)
    assert mesh.groups("pp") == mesh.groups("tp", "pp") == ((0,), (1,), (2,))


def test_numpy_integers_are_sizes() -> None:
    assert MeshShape.of({"dp": np.int64(2), "tp": np.int32(-1)}, 8).size("tp") == 4  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("sizes", "ranks", "message"),
    [
        (
            {"pp": 2, "dp": 3, "tp": 2},
            8,
            "Mesh(pp=2, dp=3, tp=2): 2 x 3 x 2 = 12, but there are 8 ranks; with dp=-1 it would be 2",
        ),
        (
            {"pp": 4, "tp": 2},
            16,
            "4 x 2 = 8, but there are 16 ranks; with pp=-1 it would be 8; with tp=-1 it would be 4",
        ),
        ({"dp": 3}, 8, "Mesh(dp=3): dp is 3, but there are 8 ranks; with dp=-1 it would be 8"),
        ({"dp": 2}, 1, "dp is 2, but there are 1 rank"),
        ({"a": 3, "b": 3}, 8, "3 x 3 = 9, but there are 8 ranks; every size must divide 8: 1, 2, 4 or 8"),
        (
            {"pp": 2, "dp": -1, "tp": 3},
            8,
            "2 x 3 = 6 does not divide 8 ranks, so dp cannot be inferred; tp could be 1, 2 or 4",
        ),
        ({"dp": -1, "tp": 16}, 8, "16 does not divide 8 ranks, so dp cannot be inferred; tp could be 1, 2, 4 or 8"),
        ({"a": 3, "b": 3, "c": -1}, 8, "so c cannot be inferred; every size must divide 8"),
        ({"dp": -1, "tp": -1}, 8, "dp and tp have no size, but only one can be inferred; give all but one"),
        ({"dp": 0}, 8, "dp is 0; expected a positive integer, or -1 to infer it"),
        ({"dp": -2}, 8, "dp is -2; expected"),
        ({"dp": True}, 1, "dp is True; expected"),
        ({"dp": 2.0}, 2, "dp is 2.0; expected"),
        ({"d p": 2}, 2, "'d p' is not a valid axis name: expected an identifier"),
        ({"in": 2}, 2, "'in' is not a valid axis name"),
        ({3: 2}, 2, "3 is not a valid axis name"),
        ([("dp", 2), ("dp", 2)], 4, "axis dp is given 2 times; names must differ"),
        ({}, 4, "Mesh(): no axis: give at least one, such as dp=-1"),
        ({"dp": -1}, 0, "there are 0 ranks"),
    ],
)
def test_wrong_sizes_are_refused(sizes: Any, ranks: int, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        MeshShape.of(sizes, ranks)
    assert message in str(caught.value)


def test_many_divisors_are_abridged() -> None:
    with pytest.raises(UsageError, match=r"every size must divide 5040: 1, 2, .*, 18, \.\.\. or 5040"):
        MeshShape.of({"a": 11, "b": 13}, 5040)


@pytest.mark.parametrize(
    ("factors", "sizes", "message"),
    [
        ({"dp": {"x": 3, "y": -1}}, {}, "3 does not divide 4 ranks along dp, so y cannot be inferred; x could be 1, 2"),
        ({"dp": {"x": 3, "y": 2}}, {}, "3 x 2 = 6, but there are 4 ranks along dp; with x=-1 it would be 2"),
        ({("dp", "tp"): {"x": 3, "y": 2}}, {}, "there are 8 ranks along dp x tp"),
        ({"dp": ("x", "y")}, {}, "x and y have no size, but only one can be inferred; give all but one"),
        ({"dp": ("x", "y")}, {"x": 2, "z": 2}, "z=2: keywords must be new names without sizes"),
        ({"dp": {"x": -1, "y": 2}}, {"y": 2}, "y=2: keywords must be new names without sizes"),
        ({"dp": {"tp": -1}}, {}, "there is already an axis tp; names must be new"),
        ({"dp": {"x": 2, "dp": 2}}, {}, "there is already an axis dp"),
        ({("pp", "tp"): {"x": 2, "y": 2}}, {}, "these axes do not follow each other in the order pp, dp, tp"),
        ({("tp", "dp"): {"x": 2, "y": 4}}, {}, "these axes do not follow each other in the order pp, dp, tp"),
        ({"ep": {"x": -1}}, {}, "has no axis 'ep'; it has pp, dp, tp"),
        ({"dp": "x"}, {}, "refactor of dp: expected names, or names with sizes, got 'x'"),
        ({"dp": 4}, {}, "expected names, or names with sizes, got 4"),
        ({"dp": {}}, {}, "no axis: give at least one"),
    ],
)
def test_wrong_refactorings_are_refused(factors: Any, sizes: dict[str, int], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        MeshShape.of({"pp": 2, "dp": 4, "tp": 2}, 16).refactor(factors, **sizes)
    assert message in str(caught.value)


def test_wrong_queries_are_refused() -> None:
    mesh = MeshShape.of({"dp": 2, "tp": 2}, 4)
    for question, message in (
        (lambda: mesh.size("pp"), "has no axis 'pp'; it has dp, tp"),
        (lambda: mesh.size(), "expected one axis or different ones, got none"),
        (lambda: mesh.groups("tp", "tp"), "expected one axis or different ones, got tp, tp"),
        (lambda: mesh.coordinate(4, "tp"), "rank is 4, expected 0 to 3"),
        (lambda: mesh.coordinates(-1), "rank is -1, expected 0 to 3"),
        (lambda: mesh.rank_at(dp=1), "needs a coordinate along each of dp, tp; got dp"),
        (lambda: mesh.rank_at(dp=1, tp=2), "tp is 2, expected 0 to 1"),
        (lambda: mesh.picture(ranks_per_node=0), "ranks_per_node is 0; expected at least 1"),
    ):
        with pytest.raises(UsageError) as caught:
            question()
        assert message in str(caught.value)
