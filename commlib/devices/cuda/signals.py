"""CudaSignals: synchronize streams of several processes without the host and without kernels.

The streams write and wait for flags in host memory, which all ranks of the node map and register with CUDA
(cudaHostRegister). So the host can read the flags, and release streams that wait for a lost rank. One driver call
queues the writes and waits of a synchronization (cuStreamBatchMemOp); CuPy has no function for it. A write is visible
only after all earlier work of its stream. A wait occupies no multiprocessor.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from commlib.buffers.views import address_of
from commlib.devices.cuda.host_mapped import HostMapped
from commlib.errors import TransportError
from commlib.protocols import SharedMemory

# CUstreamBatchMemOpParams: 48 bytes, of which these are used.
OPERATION = np.dtype(
    {
        "names": ["operation", "address", "value", "flags"],
        "formats": [np.uint32, np.uint64, np.uint32, np.uint32],
        "offsets": [0, 8, 16, 24],
        "itemsize": 48,
    }
)
WAIT_VALUE_32, WRITE_VALUE_32 = 1, 2  # CU_STREAM_MEM_OP_...
_UNTIL_NOT_BEHIND = 0  # CU_STREAM_WAIT_VALUE_GEQ, which is cyclic


@cache
def driver() -> Any:
    """Return the CUDA driver library. Raises OSError if there is none."""
    return ctypes.CDLL("libcuda.so.1")


class CudaSignals:
    """Stream memory operations as `devices.protocol.Signals`."""

    def __init__(
        self, gpu: Any, cuda: Any, memory: SharedMemory, written: Sequence[int], awaited: Sequence[int]
    ) -> None:
        """gpu: a cupy.cuda.Device. Raises TransportError."""
        self._cuda = cuda
        try:
            self._memory = HostMapped(gpu, cuda, memory)
            self._queue = driver().cuStreamBatchMemOp_v2
        except (OSError, AttributeError, TransportError) as error:
            raise TransportError(
                f"streams of GPU {gpu.id} cannot wait for streams of other processes: {error}"
            ) from error
        self._operations = np.zeros(len(written) + len(awaited), OPERATION)
        self._operations["operation"] = [
            *[WRITE_VALUE_32] * len(written),
            *[WAIT_VALUE_32] * len(awaited),
        ]
        self._operations["address"] = [*written, *awaited]
        self._operations["flags"] = _UNTIL_NOT_BEHIND
        self._values = self._operations["value"]
        self._at = ctypes.c_void_p(address_of(self._operations))

    def queue(self, number: int) -> None:
        self._values[:] = number
        stream = ctypes.c_void_p(self._cuda.get_current_stream().ptr)
        if status := self._queue(stream, ctypes.c_uint(len(self._operations)), self._at, ctypes.c_uint(0)):
            raise TransportError(f"cuStreamBatchMemOp: a stream cannot wait for other processes: CUresult {status}")

    def close(self) -> None:
        self._memory.close()
