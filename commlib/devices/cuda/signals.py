"""CudaSignals: let streams of several processes wait for each other, with no host and no kernel in between.

The words that they write and wait for are host memory that all ranks of the node map, and CUDA knows by
cudaHostRegister. So the host can read them, and let go streams that wait for somebody who will not come. The operations
are the driver's own, in one call for a meeting (cuStreamBatchMemOp); CuPy has no function for it. A write is behind all
that its stream has done before, for everybody who sees it; a wait costs no multiprocessor.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from commlib.buffers.views import address_of
from commlib.devices.cuda.reached import Reached
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
    """Return the driver's library. Raises OSError where there is none."""
    return ctypes.CDLL("libcuda.so.1")


class CudaSignals:
    """See `devices.protocol.Signals`."""

    def __init__(self, gpu: Any, cuda: Any, memory: SharedMemory, tell: Sequence[int], hear: Sequence[int]) -> None:
        """gpu: a cupy.cuda.Device. Raises TransportError."""
        self._cuda = cuda
        try:
            self._memory = Reached(gpu, cuda, memory)
            self._queue = driver().cuStreamBatchMemOp_v2
        except (OSError, AttributeError, TransportError) as error:
            raise TransportError(
                f"streams of GPU {gpu.id} cannot wait for those of other processes: {error}"
            ) from error
        self._operations = np.zeros(len(tell) + len(hear), OPERATION)
        self._operations["operation"] = [*[WRITE_VALUE_32] * len(tell), *[WAIT_VALUE_32] * len(hear)]
        self._operations["address"] = [*tell, *hear]
        self._operations["flags"] = _UNTIL_NOT_BEHIND
        self._values = self._operations["value"]
        self._at = ctypes.c_void_p(address_of(self._operations))

    def meet(self, number: int) -> None:
        self._values[:] = number
        stream = ctypes.c_void_p(self._cuda.get_current_stream().ptr)
        if status := self._queue(stream, ctypes.c_uint(len(self._operations)), self._at, ctypes.c_uint(0)):
            raise TransportError(f"the driver refused to let a stream wait for other processes: CUresult {status}")

    def close(self) -> None:
        self._memory.close()
