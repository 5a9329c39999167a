"""Plans of several plans: an all-reduce over a node and its rails, as three plans of their groups."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from commlib.communicator import Communicator
from commlib.data_parallel.plan_sequence import PlanProgram, PlanSequence
from tests.bodies import loopback


@pytest.mark.parametrize("nodes", [[0, 0, 1, 1], [0, 1, 2, 3], [0, 0, 0, 0]])
@pytest.mark.parametrize("starts", [False, True])
def test_a_program_reduces_over_two_axes_and_back(nodes: Sequence[int], starts: bool) -> None:
    """Each plan uses the result of the one before it, which ran in another group."""

    def rank(comm: Communicator) -> None:
        near, far = comm.split_all([(comm.rank // 2, 0, "near"), (comm.rank % 2, 0, "far")])
        assert near is not None and far is not None
        array, part = comm.empty(6000), near.empty(3000)
        plan = PlanProgram(
            comm,
            "all_reduce over two axes",
            [
                near.plan_reduce_scatter(array, "mean", out=part),
                far.plan_all_reduce(part, "mean", out=part),
                near.plan_all_gather(part, out=array),
            ],
            nbytes=7,
            on=array,
        )
        assert plan.sent_bytes == plan.uncompressed_bytes == 7
        for step in range(20):
            array[...] = np.arange(6000) + 4 * comm.rank + step
            if starts:
                work = plan.start()
                work.wait()
                assert work.done()
            else:
                plan()
            np.testing.assert_array_equal(array, np.arange(6000, dtype=np.float32) + 6 + step)

    loopback.run(4, rank, nodes=nodes)


def test_a_sequence_waits_for_all_its_plans() -> None:
    def rank(comm: Communicator) -> None:
        x, y = np.full(4, comm.rank, np.float32), np.full(9, 1.0)
        work = PlanSequence([comm.plan_all_reduce(array, out=array) for array in (x, y)], 0).start()
        work.wait()
        assert work.done()
        assert set(x) == {1.0} and set(y) == {2.0}

    loopback.run(2, rank)
