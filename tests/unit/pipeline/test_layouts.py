"""Messages between stages may keep changing: both ends remember a bounded number of forms."""

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
    """Send different shapes and notes each time, and repeat some: recent ones and old ones."""

    def __init__(self, stage: int) -> None:
        self.stage, self.sent, self.got = stage, 0, 0

    def values(self, number: int) -> StageValues:
        kind = number - 1 if number % 3 == 2 else number % 5 if number % 7 == 0 else number
        return StageValues([np.full((1 + kind % 200,), number, "float32")], f"note {kind}")

    def forward(self, microbatch: int, inputs: Any) -> Any:
        if self.stage == 0:
            self.sent += 1
            return {1: self.values(self.sent)}
        self.got += 1
        expected = self.values(self.got)
        assert inputs[0].note == expected.note
        np.testing.assert_array_equal(inputs[0].tensors[0], expected.tensors[0])
        return {}

    def backward(self, microbatch: int, gradients: Any, *, final: bool) -> Any:
        return {0: StageValues([None])} if self.stage else {}

    def reduce(self) -> None:
        pass


def test_forms_are_renumbered() -> None:
    """Each new number, shape or note was remembered for ever, on both ranks."""
    agreed, numbers = LayoutTable(None), []
    for count in range(1, 300):
        assert agreed.on([np.zeros(count)], [True], "")
        numbers.append(agreed.number)
        assert not agreed.on([np.zeros(count)], [True], ""), "it is known"
        assert agreed.number == numbers[-1]
        if count > 1:  # used forms stay
            assert not agreed.on([np.zeros(max(1, count - MOST_TERMS // 4))], [True], "")
    assert max(numbers) == MOST_TERMS


@pytest.mark.parametrize("nodes", [None, (0, 1)], ids=["on a node", "between nodes"])
def test_messages_arrive_unchanged_whatever_their_form(nodes: Any) -> None:
    lowered = verify(make("1f1b", 2, 6), reduce=True)

    def rank_main(comm: Any) -> Any:
        stage: Any = Counting(comm.rank)
        runner = Runner(comm, lowered, {comm.rank: stage}, ArrayTensors())
        for _ in range(60):
            runner.run()
        return stage.sent + stage.got

    assert loopback.run(2, rank_main, nodes=nodes) == [360, 360]
