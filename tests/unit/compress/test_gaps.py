"""Gaps between the parts of a bucket have no influence on them, and are not part of the state."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from commlib.communicator import Communicator
from commlib.compress import scheme_of
from commlib.compress.gaps import Gaps
from commlib.compress.gradients import GradientCompression
from commlib.compress.scheme import BucketPart
from commlib.devices.host import HOST
from tests.bodies import loopback
from tests.late import LATE

PARTS = [BucketPart("b", 16, (3, 3)), BucketPart("a", 0, (5,))]


def test_spans_are_counted_from_the_beginning_of_a_piece() -> None:
    assert Gaps(PARTS, 0, 32).spans == [(5, 16), (25, 32)]
    assert Gaps(PARTS, 0, 25).spans == [(5, 16)]
    assert Gaps(PARTS, 8, 32).spans == [(0, 8), (17, 24)]
    assert Gaps(PARTS, 16, 25).spans == []
    assert Gaps([], 0, 3).spans == [(0, 3)]


def test_gaps_are_cleared_on_host_and_device() -> None:
    expected = [1.0] * 5 + [0.0] * 11 + [1.0] * 9 + [0.0] * 7
    values = np.ones(32, np.float32)
    gaps = Gaps(PARTS, 0, 32)
    gaps.clear(values, HOST.kernels)
    assert values.tolist() == expected
    late = LATE.put(np.ones(32, np.float32))
    array = LATE.wrap(late, "test")
    gaps.clear(array, LATE.kernels)
    assert late.numpy().tolist() == expected


@pytest.mark.parametrize("name", ["sign", "int8", "topk:ratio=0.2", "qsgd"])
@pytest.mark.parametrize("nodes", [[0, 1], [0, 0, 1, 1]])
def test_a_resumed_run_does_not_depend_on_gaps(name: str, nodes: list[int]) -> None:
    """A sign is never zero: its values in the gaps returned in the next step, and were missing from the state."""

    def step(plan: Any, array: Any, comm: Communicator, number: int) -> list[float]:
        for part in PARTS:
            array[part.start : part.stop] = np.arange(part.count) - 3.3 + comm.rank + number
        array[32:] = 1
        plan()
        return [float(x) for part in PARTS for x in array[part.start : part.stop]]

    def rank(comm: Communicator) -> None:
        def make() -> Any:
            array = comm.empty((48,), "float32")
            compression = GradientCompression(comm, scheme_of(name), within_node=True)
            return array, compression, compression.reduction("bucket", array, PARTS, 32, "mean")

        array, compression, plan = make()
        for number in range(3):
            step(plan, array, comm, number)
            compression.commit()
        again, other, resumed = make()
        again[:] = 77.0
        other.load(compression.state())
        for number in range(3, 6):
            assert step(resumed, again, comm, number) == step(plan, array, comm, number)

    loopback.run(len(nodes), rank, nodes=nodes)
