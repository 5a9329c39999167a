"""Memory of messages over MPI: it stays while MPI may use it, and no longer."""

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


def is_gone(known: Any) -> bool:
    gc.collect()
    return known() is None


def test_whose_request_was_lost(transport: MpiTransport) -> None:
    """By a signal handler's exception, between what posted it and whoever would have kept it."""
    into = array(0)
    known, out = weakref.ref(into), array(1)
    transport.recv(transport.rank, 1, memoryview(into).cast("B"))
    del into
    assert not is_gone(known)  # what comes is written there
    sent = transport.send(transport.rank, 1, memoryview(out).cast("B"))
    while not sent.test():
        pass


def test_that_has_come(transport: MpiTransport) -> None:
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
        assert is_gone(received) and is_gone(sent)


def test_that_is_cancelled(transport: MpiTransport) -> None:
    into = array(0)
    known, request = weakref.ref(into), transport.recv(transport.rank, 3, memoryview(into).cast("B"))
    request.cancel()
    del into, request
    assert is_gone(known)
