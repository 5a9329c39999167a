"""Emulate, for a dry run, the parts of CuPy that only benchmarks use: timed events, NCCL messages.

Names and signatures are CuPy's.
"""

from __future__ import annotations

import ctypes
import time
from typing import Any

import numpy as np


def install() -> None:
    """Make `import cupy` return the tests' emulation, with these additions, for the rest of the process."""
    from tests.cuda import nccl_standin, standin

    cupy: Any = standin.install()
    cuda = cupy.cuda

    class Event(standin.Event):
        """An event that records the time at which it was queued."""

        def record(self, stream: Any = None) -> None:
            super().record(stream)
            self.at = time.perf_counter()

    class NcclCommunicator(nccl_standin.NcclCommunicator):
        """An NCCL communicator with messages, which are in flight until `groupEnd`."""

        requests: list[Any] = []  # noqa: RUF012  # per process, like NCCL groups

        def __init__(self, ndev: int, commId: bytes, rank: int, config: Any = None) -> None:
            from mpi4py import MPI

            super().__init__(ndev, commId, rank, config)
            self._world = MPI.COMM_WORLD.Dup()

        def send(self, sendbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
            self.requests.append(self._world.Isend(self._at(sendbuf, count, datatype, stream), peer))

        def recv(self, recvbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
            self.requests.append(self._world.Irecv(self._at(recvbuf, count, datatype, stream), peer))

        def _at(self, address: int, count: int, datatype: int, stream: int) -> Any:
            """Return memory as bytes, after all earlier work on the stream."""
            standin.Stream.known[stream].record().block()
            width = {cuda.nccl.NCCL_FLOAT32: 4, cuda.nccl.NCCL_BFLOAT16: 2}[datatype]
            raw: Any = (ctypes.c_uint8 * (count * width)).from_address(address)
            return np.frombuffer(raw, np.uint8)

    def end_group() -> None:
        for request in NcclCommunicator.requests:
            request.Wait()
        NcclCommunicator.requests.clear()

    cuda.Event, cuda.get_elapsed_time = Event, lambda first, last: (last.at - first.at) * 1e3
    vars(cuda.runtime).update(
        driverGetVersion=lambda: 0,
        runtimeGetVersion=lambda: 0,
        getDeviceProperties=lambda device: {"name": b"stand-in of host memory", "totalGlobalMem": 1 << 34},
    )
    vars(cuda.nccl).update(NcclCommunicator=NcclCommunicator, groupStart=lambda: None, groupEnd=end_group)
