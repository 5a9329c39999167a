"""Equations against numpy: computing one part at a time shows the meaning of each dimension of the result."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commlib.errors import UsageError
from commlib.tensor_parallel import equations
from commlib.tensor_parallel.placements import Placement, reshape_placement
from tests.inputs.traces import holds

LENGTHS = st.sampled_from([1, 2, 4])


def random(*shape):
    return np.random.default_rng(0).standard_normal(shape)


@given(st.lists(LENGTHS, min_size=0, max_size=3), st.data())
def test_pointwise_equations_match_numpy(shape, data):
    others = [1 if data.draw(st.booleans()) else length for length in shape[data.draw(st.integers(0, len(shape))) :]]
    equation = equations.pointwise(tuple(shape), tuple(others))
    holds(equation, lambda x, y: x + y, random(*shape), random(*others))


@pytest.mark.parametrize(
    ("left", "right"),
    [((2, 4), (4, 6)), ((2, 4, 6), (2, 6, 4)), ((2, 4, 6), (6, 2)), ((2, 1, 4, 6), (4, 6, 2)), ((4,), (4, 2)),
     ((2, 4), (4,)), ((2, 2, 4), (4,)), ((4,), (2, 4, 6))],
)  # fmt: skip
def test_products_match_numpy(left, right):
    assert holds(equations.product(left, right), np.matmul, random(*left), random(*right))
    equation = equations.product(left, right)
    assert equation.inputs[0][-1] not in equation.output
    assert equations.product((4,), (4,)).output == ()


@pytest.mark.parametrize(
    ("text", "shapes"),
    [("ij,jk->ik", [(2, 4), (4, 6)]), ("...ij,kj->...ik", [(2, 4, 6), (2, 6)]), ("bij", [(2, 4, 6)]),
     ("ij,kj", [(2, 4), (6, 4)]), ("i...,...j->...ij", [(2, 4), (4, 6)]), ("...,...->...", [(2, 4), (4,)])],
)  # fmt: skip
def test_einsum_matches_numpy(text, shapes):
    arrays = [random(*shape) for shape in shapes]
    assert holds(equations.einsum(text, shapes), lambda *given: np.einsum(text, *given), *arrays)


def test_einsum_counts_its_operands():
    with pytest.raises(UsageError, match="has 2 operands, got 1"):
        equations.einsum("ij,jk->ik", [(2, 4)])


def test_reductions_and_normalisations_match_numpy():
    x = random(2, 4, 6)
    assert holds(equations.reduction(x.shape, (1,)), lambda y: y.sum(1), x) == 2
    assert holds(equations.reduction(x.shape, (-1,), keeps_dims=True), lambda y: y.max(-1, keepdims=True), x) == 2
    assert equations.reduction(x.shape, (0, 1, 2)).output == ()
    assert holds(equations.dimwise(x.shape, (-2,)), lambda y: np.cumsum(y, -2), x) == 2


def test_views_match_numpy():
    x = random(2, 4, 6)
    assert holds(equations.selection(3, (2, 0, 1)), lambda y: y.transpose(2, 0, 1), x) == 3
    assert holds(equations.selection(3, (0, -1, 2)), lambda y: y[:, None, 1], x) == 2
    assert equations.selection(3, (0, 2)).needs == {1}


def attended(q, k, v):
    scores = q @ k.swapaxes(-1, -2)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ v


def test_attention_matches_numpy():
    q, k, v = random(2, 4, 6, 8), random(2, 4, 2, 8), random(2, 4, 2, 6)
    equation = equations.attention(q.shape, k.shape, v.shape)
    assert holds(equation, attended, q, k, v) == 4
    shared = equations.attention(q.shape, (2, 1, 2, 8), (2, 1, 2, 6))
    assert shared.inputs[1][1] == ~shared.inputs[0][1]


@given(st.integers(1, 3), st.integers(1, 3), st.sampled_from([(4, 2), (2, 4), (4, 1), (6, 2)]), st.integers(1, 2))
def test_reshapes_follow_the_divided_dimension(rows, tokens, heads, ranks):
    """Half of the features become half of the heads."""
    count, size = heads
    if count % 2:
        return
    x = np.arange(rows * tokens * count * size).reshape(rows, tokens, count * size)
    new = (rows, tokens, count, size)
    state = reshape_placement(Placement("features", 2), x.shape, new)
    if state is None or state.name == "unknown":
        return
    halves = [half.reshape(rows, tokens, -1, size) for half in np.split(x, 2, 2)]
    np.testing.assert_array_equal(np.concatenate(halves, state.dim), x.reshape(new))
    back = reshape_placement(state, new, x.shape)
    assert back is not None
    assert (back.name, back.dim) == ("features", 2)


def test_fused_parts_can_be_reshaped():
    fused = Placement("features", 2, parts=3)
    assert reshape_placement(fused, (2, 5, 48), (2, 5, 3, 4, 4)) == Placement("features", 3, unit=-1)
    assert reshape_placement(fused, (2, 5, 48), (2, 5, 12, 4)) is None
    assert reshape_placement(fused, (2, 5, 48), (10, 48)) == Placement("features", 1, parts=3)
    assert reshape_placement(Placement("features", 2, unit=4), (2, 5, 4), (2, 5, 1, 4)) == Placement(
        "features", 2, unit=-1
    )
    unknown = reshape_placement(Placement("sequence", 1), (2, 5, 8), (10, 8))
    assert unknown is not None
    assert unknown.name == "unknown"
