"""Emulate the parts of CuPy, PyTorch and MPI that only `commlib bench --device cuda` uses: for tests and dry runs.

    mpiexec -n 2 python -m tests.cuda.bench_standin bench all_reduce --device cuda     # the command, on the stand-in

Names and signatures are CuPy's. All memory is the host's, so torch's gloo and MPI work on it; figures are meaningless.
"""

from __future__ import annotations

import ctypes
import time
from typing import Any

import numpy as np


def install(*, one_gpu: bool = False) -> None:
    """Make `import cupy` return the tests' stand-in, with these additions, for the rest of the process.

    one_gpu: the machine has one GPU, which all ranks share.
    """
    from commlib.bench import gloo_peer, mpi_peer
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
            assert datatype == cuda.nccl.NCCL_UINT8
            raw: Any = (ctypes.c_uint8 * count).from_address(address)
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
    if one_gpu:
        vars(cuda.runtime).update(getDeviceCount=lambda: 1)
    # torch has no tensors on the stand-in, and MPI does not know that its memory is the host's.
    vars(gloo_peer).update(tensor_on_gpu=_host_tensor, finish_on_gpu=lambda: None)
    vars(mpi_peer).update(is_cuda_aware=lambda: True)


def _host_tensor(array: Any) -> Any:
    """Return a tensor of bytes over an array's memory, after all queued work."""
    import torch

    from tests.cuda import standin_streams

    standin_streams.get_current_stream().synchronize()
    return torch.frombuffer((ctypes.c_uint8 * array.nbytes).from_address(array.data.ptr), dtype=torch.uint8)


if __name__ == "__main__":
    from commlib.cli import main

    install(one_gpu=True)
    main()
