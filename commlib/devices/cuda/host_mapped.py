"""Host-mapped memory: shared host memory that a GPU can address (cudaHostRegister)."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from commlib.errors import TransportError
from commlib.protocols import SharedMemory

_PORTABLE_AND_MAPPED = 3  # of cudaHostRegister


class HostMapped:
    """Registered host memory as a `protocols.SharedMemory`. See `devices.protocol.Device.reach`."""

    def __init__(self, gpu: Any, cuda: Any, memory: SharedMemory) -> None:
        """gpu: a cupy.cuda.Device. On TransportError the memory is closed."""
        self.bases, self.nbytes = memory.bases, memory.nbytes
        runtime = cuda.runtime
        registered: list[int] = []
        # The memory must not be unmapped while it is registered.
        self._end = weakref.finalize(self, _unregister, gpu, runtime, registered, memory)
        self._end.atexit = False
        try:
            with gpu:
                for base in memory.bases:
                    runtime.hostRegister(base, memory.nbytes, _PORTABLE_AND_MAPPED)
                    registered.append(base)
                if not runtime.deviceGetAttribute(runtime.cudaDevAttrCanUseHostPointerForRegisteredMem, gpu.id):
                    raise OSError("the GPU uses other addresses for registered host memory")
        except (OSError, runtime.CUDARuntimeError) as error:
            self._end()
            raise TransportError(
                f"GPU {gpu.id} cannot address {memory.nbytes} bytes of host memory of {len(memory.bases)} ranks each: "
                f"{error} (is the limit of locked memory too low? ulimit -l)"
            ) from error

    def close(self) -> None:
        """Unregister and free the memory. No queued work may still use it."""
        self._end()


def _unregister(gpu: Any, runtime: Any, registered: Sequence[int], memory: SharedMemory) -> None:
    with gpu:
        for base in registered:
            runtime.hostUnregister(base)
    memory.close()
