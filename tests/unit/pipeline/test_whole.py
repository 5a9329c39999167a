"""A divided model is compared with the whole one, and all ranks name the first different value."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from commlib.errors import UsageError
from commlib.pipeline.cut_check import ModelRun, compare_with_original


class Group:
    """Two ranks in one thread: the other rank gathers the values of this one."""

    rank, size = 0, 2

    def __init__(self, other: Any = None) -> None:
        self.other = other

    def all_gather_object(self, value: Any) -> list[Any]:
        return [value, value if self.other is None else self.other]


def run(**changes: Any) -> ModelRun:
    given: dict[str, dict[str, Any]] = {
        "values": {"the output of a": np.ones(3), "the output": "a tensor"},
        "gradients": {"a.weight": np.full(4, 100.0), "a.bias": np.full(2, 1e-10), "b.weight": None},
        "state": {"a.count": np.array(1)},
        "stages": {"the output of a": 0, "a.weight": 0, "b.weight": 1},
    }
    return ModelRun(**{name: {**value, **changes.get(name, {})} for name, value in given.items()})


def test_equal_runs_pass() -> None:
    compare_with_original(Group(), run(), run())
    rounded = run(gradients={"a.bias": np.full(2, -1e-10)})  # zero up to rounding, compared with the others
    compare_with_original(Group(), run(), rounded)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"values": {"the output of a": np.array([1.0, 1.5, 1.0])}}, r"the output of a \(stage 0\) differs: by 0.5"),
        ({"values": {"the output of a": np.ones(2)}}, r"its shape is \[2\], expected \[3\]"),
        ({"values": {"the output of a": np.ones(3, np.float32)}}, "of dtype float32, expected float64"),
        ({"values": {"the output": "a tuple"}}, "the output is a tuple, expected a tensor"),
        ({"gradients": {"a.weight": None}}, r"the gradient of a.weight \(stage 0\) is missing"),
        ({"gradients": {"b.weight": np.ones(1)}}, r"b.weight \(stage 1\) exists, but the original model has none"),
        ({"state": {"a.count": np.array(2)}}, "a.count after it differs: by 1"),
        ({"gradients": {"c": None}}, "the gradient of c does not exist in the original model"),
    ],
)
def test_differences_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=f"the cut model differs from the original, in training: .*{message}"):
        compare_with_original(Group(), run(), run(**changes), when="in training")


def test_all_ranks_name_the_first_difference() -> None:
    other: Any = ((0, "the output of a differs"), [])
    with pytest.raises(UsageError, match=r"the output of a differs \(on rank 1\)"):
        compare_with_original(Group(other), run(), run(state={"a.count": np.array(2)}))


def test_a_value_that_no_rank_has_is_missed() -> None:
    own = ModelRun(values={"the output": "a tensor"})
    with pytest.raises(UsageError, match="no stage has the output of a"):
        compare_with_original(Group(), run(), own)
    compare_with_original(Group(), run(), own, every=False)
