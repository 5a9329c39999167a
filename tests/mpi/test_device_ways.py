"""Which verbs send a device's own memory where MPI takes that, and which copy it to the host: a table, as measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from commlib.transport.mpi import MpiTransport
from tests.late import LATE

COUNT = 6000  # bytes go by messages of their own, not with what describes them


@dataclass(slots=True)
class Counted:
    """What all ranks did in one call."""

    copies: int = 0  # to or from the host
    messages: int = 0  # of the device's memory


@pytest.fixture(scope="module")
def comm(both_ways):
    return both_ways


@pytest.fixture
def counted(comm, monkeypatch):
    """Return what runs a call on every rank, and says how its data went."""

    def count(call: Callable[[], Any]) -> Counted:
        found = Counted()
        copy, addressed = LATE.copy, MpiTransport._addressed

        def counting_copy(target: Any, source: Any) -> None:
            found.copies += any(isinstance(array, np.ndarray) for array in (target, source))
            copy(target, source)

        def counting_address(self: Any, buffer: Any) -> Any:
            found.messages += 1
            return addressed(self, buffer)

        LATE.synchronise()
        with monkeypatch.context() as patch:
            patch.setattr(LATE, "copy", counting_copy)
            patch.setattr(MpiTransport, "_addressed", counting_address)
            call()
            comm.barrier()
        copies, messages = (comm.native.allreduce(n, MPI.SUM) for n in (found.copies, found.messages))
        return Counted(copies, messages)

    return count


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
    "send_recv": lambda comm, x: comm.send_recv(
        x, (comm.rank + 1) % comm.size, LATE.empty((COUNT,)), (comm.rank - 1) % comm.size
    ),
}
STAGED_ALWAYS = {"native", "send_recv"}
"""Where nothing else is there yet."""
OF_MPI_ITSELF = {"native"}
"""Where no message is ours."""


@pytest.mark.parametrize("verb", CALLS)
def test_the_way_of_a_verb(comm, counted, verb):
    x = everyone(comm)
    found = counted(lambda: CALLS[verb](comm, x))
    if comm.group.transport.accepts("late") and verb not in STAGED_ALWAYS:
        assert found.copies == 0
        assert found.messages > 0 or comm.size == 1 or verb in OF_MPI_ITSELF
    else:
        assert found.copies > 0 or comm.size == 1
        assert found.messages == 0
