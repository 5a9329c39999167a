"""What goes from stage to stage may change for ever: both ends of a way remember some of it, and no more."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from commlib.pipeline.links import MOST_TERMS, LayoutTable
from commlib.pipeline.runner import Runner
from commlib.pipeline.schedule import make, verify
from commlib.pipeline.stage import StageValues
from tests.bodies import loopback
from tests.bodies.pipelines import ArrayTensors


class Counting:
    """Send other shapes and another note each time, and some again: those sent just before, and those of long ago."""

    def __init__(self, stage: int) -> None:
        self.stage, self.sent, self.got = stage, 0, 0

    def made(self, number: int) -> StageValues:
        kind = number - 1 if number % 3 == 2 else number % 5 if number % 7 == 0 else number
        return StageValues([np.full((1 + kind % 200,), number, "float32")], f"note {kind}")

    def forward(self, microbatch: int, inputs: Any) -> Any:
        if self.stage == 0:
            self.sent += 1
            return {1: self.made(self.sent)}
        self.got += 1
        expected = self.made(self.got)
        assert inputs[0].note == expected.note
        np.testing.assert_array_equal(inputs[0].tensors[0], expected.tensors[0])
        return {}

    def backward(self, microbatch: int, gradients: Any, *, final: bool) -> Any:
        return {0: StageValues([None])} if self.stage else {}

    def reduce(self) -> None:
        pass


def test_terms_are_numbered_anew() -> None:
    """Each new number, shape or note was remembered for ever, on both ranks."""
    agreed, numbers = LayoutTable(None), []
    for count in range(1, 300):
        assert agreed.on([np.zeros(count)], [True], "")
        numbers.append(agreed.number)
        assert not agreed.on([np.zeros(count)], [True], ""), "it is known"
        assert agreed.number == numbers[-1]
        if count > 1:  # what is used is kept
            assert not agreed.on([np.zeros(max(1, count - MOST_TERMS // 4))], [True], "")
    assert max(numbers) == MOST_TERMS


@pytest.mark.parametrize("nodes", [None, (0, 1)], ids=["on a node", "between nodes"])
def test_what_comes_is_what_was_sent_whatever_changes(nodes: Any) -> None:
    lowered = verify(make("1f1b", 2, 6), reduce=True)

    def rank_main(comm: Any) -> Any:
        stage: Any = Counting(comm.rank)
        runner = Runner(comm, lowered, {comm.rank: stage}, ArrayTensors())
        for _ in range(60):
            runner.run()
        return stage.sent + stage.got

    assert loopback.run(2, rank_main, nodes=nodes) == [360, 360]
