"""Paths of device arrays: a table, as measured, of the verbs that pass device memory to MPI or copy it to the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.bodies.device_paths import count
from tests.late import LATE

pytestmark = [pytest.mark.any_mpi, pytest.mark.any_ranks]

COUNT = 6000  # bytes go by messages of their own, separate from their description


@pytest.fixture(scope="module")
def comm(both_ways):
    return both_ways


def everyone(comm: Any, *shape: int) -> Any:
    return LATE.put(np.full(shape or (COUNT,), comm.rank + 1.0, np.float32))


CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "all_reduce": lambda comm, x: comm.all_reduce(x),
    "reduce_scatter": lambda comm, x: comm.reduce_scatter(x),
    "reduce_scatter_v": lambda comm, x: comm.reduce_scatter_v(
        x, [len(x.peek()) - comm.size + 1, *[1] * (comm.size - 1)]
    ),
    "reduce": lambda comm, x: comm.reduce(x),
    "scan": lambda comm, x: comm.scan(x),
    "exscan": lambda comm, x: comm.exscan(x),
    "broadcast": lambda comm, x: comm.broadcast(x),
    "all_gather": lambda comm, x: comm.all_gather(x),
    "all_gather_v": lambda comm, x: comm.all_gather_v(x[: COUNT - comm.rank]),
    "gather": lambda comm, x: comm.gather(x),
    "scatter": lambda comm, x: comm.scatter(x if comm.rank == 0 else None),
    "all_to_all": lambda comm, x: comm.all_to_all(x),
    "all_to_all_v": lambda comm, x: comm.all_to_all_v(x, [COUNT - comm.size + 1, *[1] * (comm.size - 1)]),
    "native": lambda comm, x: comm.all_reduce(x, algorithm="native"),
}


@pytest.mark.parametrize("verb", CALLS)
def test_each_verb_takes_the_expected_path(comm, verb):
    x = everyone(comm)
    counted = count(comm, lambda: CALLS[verb](comm, x))
    if comm.group.transport.accepts("late"):
        assert counted.copies == 0
        assert (counted.native if verb == "native" else counted.messages) > 0 or comm.size == 1
    else:
        assert counted.copies > 0 or comm.size == 1
        assert counted.messages == counted.native == 0


@pytest.mark.ranks(min=2)
def test_the_memory_of_a_node_is_the_hosts(comm):
    """An algorithm requested by name goes through it."""
    x = everyone(comm)
    for call in (lambda: comm.all_reduce(x, algorithm="node"), lambda: comm.scatter(x, algorithm="node")):
        counted = count(comm, call)
        assert counted.copies > 0
        assert counted.messages == 0
