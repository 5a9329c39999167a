"""Arguments that are parts already: steps before a layer that takes parts must follow the rules, too."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from commlib.tensor_parallel import Column, Plan, Row, Vocabulary
from commlib.tensor_parallel.rules import PlanError, check
from tests.inputs.traces import WrittenTrace

PLAN: Plan = {"up": Column(sequence=1), "down": Row(sequence=1)}
Before = Callable[[WrittenTrace, int], int]


def checked(before: Before):
    m = WrittenTrace()
    x = before(m, m.given(2, 4, 6))
    return check(m.trace(m.linear("down", m.linear("up", x, 12), 6)), PLAN, size=2)


@pytest.mark.parametrize("before, rule", [
    (lambda m, x: m.softmax(x, 1), "needs"),
    (lambda m, x: m.pointwise(x, m.reshape(m.pick(x, 1), 2, 1, 6)), "needs"),
    (lambda m, x: m.pointwise(x, m.reshape(m.mean(x, 1), 2, 1, 6)), "partial"),
    (lambda m, x: m.pointwise(x, m.constant(4, 1)), "match"),
    (lambda m, x: m.norm("norm", x), "gradient"),
    (lambda m, x: m.attend(x, x, x), "match"),
])  # fmt: skip
def test_operations_over_a_whole_sequence_are_refused(before: Before, rule: str) -> None:
    with pytest.raises(PlanError, match="by the caller") as caught:
        checked(before)
    assert caught.value.rule == rule


@pytest.mark.parametrize("before, parts", [
    (lambda m, x: x, {0: 1}),
    (lambda m, x: m.softmax(x), {0: 1}),
    (lambda m, x: m.permute(m.softmax(m.permute(x, 1, 0, 2)), 1, 0, 2), {0: 1}),
    (lambda m, x: m.reshape(m.softmax(m.reshape(x, 2, 4, 2, 3)), 2, 4, 6), {0: 1}),
    (lambda m, x: m.reshape(m.softmax(m.reshape(x, 8, 6)), 2, 4, 6), {0: 1}),
    (lambda m, x: m.pointwise(x, m.given(1, 4, 1)), {0: 1, 1: 1}),
    (lambda m, x: m.pointwise(x, m.given(2, 1, 1)), {0: 1}),
    (lambda m, x: m.pointwise(x, m.constant(1, 6)), {0: 1}),
])  # fmt: skip
def test_parts_among_the_arguments_are_found(before: Before, parts: dict[int, int]) -> None:
    result = checked(before)
    assert result.inputs_sharded and result.sequences_sharded and not result.doubts
    assert dict(result.sharded_dims) == parts


def test_an_argument_may_be_divided_along_another_dimension() -> None:
    m = WrittenTrace()
    x = m.permute(m.given(4, 2, 6), 1, 0, 2)
    result = check(m.trace(m.linear("down", m.linear("up", x, 12), 6)), PLAN, size=2)
    assert dict(result.sharded_dims) == {0: 0}


def test_features_may_arrive_in_parts() -> None:
    def trace(before: Before):
        m = WrittenTrace()
        return m.trace(m.linear("down", before(m, m.given(2, 4, 6)), 8), whole=False)

    result = check(trace(lambda m, x: m.pointwise(x)), {"down": Row()}, size=2)
    assert result.inputs_sharded and not result.sequences_sharded and not result.sharded_dims
    with pytest.raises(PlanError, match="by the caller"):
        check(trace(lambda m, x: m.softmax(x)), {"down": Row()}, size=2)


def test_whole_words_stay_whole() -> None:
    m = WrittenTrace()
    x = m.table("words", m.given(2, 8), 32, 6)
    plan: Plan = {"words": Vocabulary(sequence=1), **PLAN}
    result = check(m.trace(m.linear("down", m.linear("up", x, 12), 6)), plan, size=2, divided_output=True)
    assert not result.inputs_sharded and not result.sharded_dims
