"""Labels: calls for different purposes never match, even if they are otherwise equal."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from commlib.errors import MismatchError
from tests.bodies.loopback import run

VERBS = {
    "all_reduce": (),
    "reduce": (),
    "reduce_scatter": (),
    "reduce_scatter_v": ([1, 3],),
    "scan": (),
    "broadcast": (),
    "all_gather": (),
    "all_gather_v": (),
    "gather": (),
    "scatter": (),
    "all_to_all": (),
    "all_to_all_v": ([2, 2],),
}


@pytest.mark.parametrize("nodes", [[0, 0], [0, 1]], ids=["one node", "two nodes"])
@pytest.mark.parametrize("verb", VERBS)
def test_a_call_with_a_label_matches_only_calls_with_the_same_label(verb: str, nodes: list[int]) -> None:
    def check(comm: Any) -> None:
        labelled = comm.labelled("of gradients")
        assert labelled is comm.labelled("of gradients") is not comm.labelled("with gradient")
        x = np.arange(4.0)
        expected = getattr(comm, verb)(x.copy(), *VERBS[verb])
        for _ in range(3):  # compiled, and not
            np.testing.assert_equal(getattr(labelled, verb)(x.copy(), *VERBS[verb]), expected)
            np.testing.assert_equal(getattr(comm, verb)(x.copy(), *VERBS[verb]), expected)
        with pytest.raises(MismatchError, match="of gradients"):
            getattr(comm if comm.rank else labelled, verb)(x.copy(), *VERBS[verb])

    run(2, check, nodes=nodes)


def test_calls_with_and_without_a_label_keep_their_order() -> None:
    def check(comm: Any) -> None:
        x = np.full(3, comm.rank + 1.0)
        works = []
        for step in range(20):
            which = comm.labelled("a") if step % 3 else comm
            works.append(which.all_reduce_async(x * step))
        for step, work in enumerate(works):
            np.testing.assert_array_equal(work.wait(), np.full(3, 3.0 * step))

    run(2, check)
