"""Memory of messages over MPI: it is kept for as long as MPI may use it, and no longer."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from commlib.transport.mpi import MpiTransport

pytestmark = [pytest.mark.any_mpi, pytest.mark.any_ranks]


@pytest.fixture
def transport(comm: Any) -> Iterator[MpiTransport]:
    native = comm.native.Dup()
    yield MpiTransport(native, longest=4096)
    comm.barrier()
    native.Free()


def array(value: float) -> Any:
    return np.full(2000, value)  # four pieces


def is_freed(reference: Any) -> bool:
    gc.collect()
    return reference() is None


def test_memory_of_a_lost_request(transport: MpiTransport) -> None:
    """A signal handler's exception lost it, after posting and before storing."""
    into = array(0)
    reference, out = weakref.ref(into), array(1)
    transport.recv(transport.rank, 1, memoryview(into).cast("B"))
    del into
    assert not is_freed(reference)  # arriving data is written there
    sent = transport.send(transport.rank, 1, memoryview(out).cast("B"))
    while not sent.test():
        pass


def test_memory_of_a_completed_request(transport: MpiTransport) -> None:
    for probed in (False, True):
        into, out = array(0), array(2)
        received, sent = weakref.ref(into), weakref.ref(out)
        post = transport.recv_probed if probed else transport.recv
        requests: list[Any] = [
            post(transport.rank, 2, memoryview(into).cast("B")),
            transport.send(transport.rank, 2, memoryview(out).cast("B")),
        ]
        for request in requests:
            while not request.test():
                pass
        np.testing.assert_array_equal(into, 2)
        del into, out, requests, request
        assert is_freed(received) and is_freed(sent)


def test_memory_of_a_cancelled_request(transport: MpiTransport) -> None:
    into = array(0)
    reference, request = weakref.ref(into), transport.recv(transport.rank, 3, memoryview(into).cast("B"))
    request.cancel()
    del into, request
    assert is_freed(reference)
