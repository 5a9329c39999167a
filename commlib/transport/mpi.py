"""Messages and shared windows over MPI.

Every group has its own duplicated MPI communicator, so commlib's messages never match the user's. Waiting polls
(MPI_Testall) instead of blocking inside MPI, so that a wait can be watched, timed out and given up.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from commlib.errors import TransportError
from commlib.transport.base import Idle, Request
from commlib.typing import SharedMemory

# MPI counts are C ints before MPI 4: longer messages are cut, on both sides alike.
_LONGEST = 1 << 30

# How a wait polls: first at once, then giving the core away, then with short sleeps.
_EAGER_POLLS, _YIELDING_POLLS, _NAP = 200, 2000, 50e-6

_LEFT_BEHIND: list[Any] = []  # sends that were given up: MPI may still read their buffers


class _MpiRequest:
    __slots__ = ("_buffer", "_requests", "_statuses", "nbytes")

    def __init__(self, requests: list[Any], buffer: memoryview) -> None:
        self._requests, self._buffer = requests, buffer
        self.nbytes = 0

    def test(self) -> bool:
        try:
            while self._requests:
                status = MPI.Status()
                if not self._requests[0].Test(status):
                    return False
                self.nbytes += status.Get_count(MPI.BYTE)
                self._requests.pop(0)
        except MPI.Exception as error:
            if error.Get_error_class() != MPI.ERR_TRUNCATE:
                raise TransportError(f"MPI: {error}") from error
            self._requests.pop(0)
            self.nbytes = -1
        return not self._requests

    def cancel(self) -> None:
        for request in self._requests:
            try:
                request.Cancel()
                request.Free()
            except MPI.Exception:
                _LEFT_BEHIND.append((request, self._buffer))


class MpiSharedMemory:
    """An MPI shared window: `nbytes` for each rank."""

    def __init__(self, comm: Any, nbytes: int) -> None:
        info = MPI.Info.Create()
        info.Set("alloc_shared_noncontig", "true")  # each part on its own pages, near the rank that touches it first
        try:
            # 64 bytes more, so that the part can begin at a cache line whatever MPI's alignment is.
            self._window = MPI.Win.Allocate_shared(nbytes + 64, 1, info=info, comm=comm)
        except MPI.Exception as error:
            raise TransportError(
                f"cannot allocate {nbytes} bytes of shared memory on each of {comm.size} ranks ({error}): "
                "is /dev/shm (or MPI's session folder) large enough?"
            ) from error
        finally:
            info.Free()
        memories: list[Any] = [self._window.Shared_query(rank)[0] for rank in range(comm.size)]
        parts = [np.frombuffer(memory, np.uint8) for memory in memories]
        # The distance to the cache line is the owner's: virtual addresses differ, but pages map alike.
        self.bases = [(part.ctypes.data + 63) // 64 * 64 for part in parts]
        self.nbytes = nbytes
        parts[comm.rank][:] = 0
        comm.Barrier()

    def close(self) -> None:
        self._window.Free()


class MpiTransport:
    """One rank's end of a group of MPI processes. Owns the communicator that it is given."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()
        self._top_tag: Any = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)  # an MPI has it on this communicator only

    @property
    def native(self) -> Any:
        return self._comm

    def _post(self, operation: Any, peer: int, tag: int, buffer: memoryview) -> _MpiRequest:
        pieces = range(0, max(1, len(buffer)), _LONGEST)
        try:
            requests = [operation([buffer[i : i + _LONGEST], MPI.BYTE], peer, tag % self._top_tag) for i in pieces]
        except MPI.Exception as error:
            raise TransportError(f"MPI: {error}") from error
        return _MpiRequest(requests, buffer)

    def send(self, peer: int, tag: int, data: memoryview) -> Request:
        return self._post(self._comm.Isend, peer, tag, data)

    def recv(self, peer: int, tag: int, into: memoryview) -> Request:
        return self._post(self._comm.Irecv, peer, tag, into)

    def wait(self, requests: Sequence[Request], idle: Idle) -> None:
        pending = list(requests)
        polls, checked = 0, time.monotonic()
        while True:
            pending = [request for request in pending if not request.test()]
            if not pending:
                return
            polls += 1
            if polls < _EAGER_POLLS:
                continue
            if polls < _YIELDING_POLLS:
                os.sched_yield()
            else:
                time.sleep(_NAP)
            if time.monotonic() - checked > 0.02:
                idle()
                checked = time.monotonic()

    def split(self, color: int, key: int) -> MpiTransport | None:
        comm = self._comm.Split(MPI.UNDEFINED if color < 0 else color, key)
        return None if comm == MPI.COMM_NULL else MpiTransport(comm)

    def split_node(self) -> MpiTransport:
        return MpiTransport(self._comm.Split_type(MPI.COMM_TYPE_SHARED, self.rank))

    def share(self, nbytes: int) -> SharedMemory:
        return MpiSharedMemory(self._comm, nbytes)

    def close(self) -> None:
        self._comm.Free()
