"""The ranks of a communicator in reverse order: the backward of a scan is a scan from the last rank to the first."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from commlib.communicator import Communicator

_KEY = "reversed ranks"


def reversed_ranks(comm: Communicator) -> Communicator:
    """Return the communicator of the same ranks in reverse order. The first call makes it and is collective."""
    if comm.size == 1:
        return comm
    reversed_comm: Communicator | None = comm.cached.get(_KEY)
    if reversed_comm is None:
        reversed_comm = comm.cached[_KEY] = comm.split(0, -comm.rank, name=f"{comm.name} in reverse order")
        assert reversed_comm is not None
    return reversed_comm
