"""Device paths: count how the data of calls travelled. Copies, messages of device memory, array types."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from commlib.communicator import Communicator
from commlib.transport.mpi import MpiTransport
from tests.late import LATE


@dataclass(slots=True)
class Counted:
    """What all ranks did in one call. native: calls of MPI's own collectives with a device's memory."""

    copies: int = 0
    messages: int = 0
    native: int = 0


def count(comm: Any, call: Callable[[], Any]) -> Counted:
    """Run a call on all ranks, and return the counts. Collective."""
    counted = Counted()
    copy, addressed, at = LATE.copy, MpiTransport.addressed, MPI.buffer.fromaddress

    def counting_copy(target: Any, source: Any) -> None:
        counted.copies += any(isinstance(array, np.ndarray) for array in (target, source))
        copy(target, source)

    def counting_addressed(self: Any, buffer: Any) -> Any:
        counted.messages += 1
        counted.native -= 1
        return addressed(self, buffer)

    class CountingBuffer:
        @staticmethod
        def fromaddress(address: int, nbytes: int, readonly: bool = False) -> Any:
            counted.native += 1
            return at(address, nbytes, readonly)

    LATE.synchronise()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LATE, "copy", counting_copy)
        patch.setattr(MpiTransport, "addressed", counting_addressed)
        patch.setattr(MPI, "buffer", CountingBuffer)
        call()
        comm.barrier()
    return Counted(*(comm.native.allreduce(n, MPI.SUM) for n in (counted.copies, counted.messages, counted.native)))


def kinds_gathered(patch: pytest.MonkeyPatch) -> set[type]:
    """Return a set of the types of all arrays passed to all_gather_v from now on."""
    kinds, plain = set[type](), Communicator.all_gather_v

    def gather(comm: Communicator, x: Any) -> Any:
        kinds.add(type(x))
        return plain(comm, x)

    patch.setattr(Communicator, "all_gather_v", gather)
    return kinds
