"""CupyLauncher: load kernels that were compiled for this GPU, and queue them on the current stream."""

from __future__ import annotations

import threading
from typing import Any, Protocol

from commlib.devices.array import DeviceArray
from commlib.devices.cuda.binaries import binary
from commlib.devices.protocol import Stream
from commlib.devices.waiting import wait_for
from commlib.dtypes import Array
from commlib.kernels.cuda.launcher import Defines
from commlib.kernels.cuda.sources import OPTIONS, whole

_LANES = 32  # threads of a worker
_WORKERS_OF_A_BLOCK = 8
_WORKERS_OF_A_MULTIPROCESSOR = 64  # as many as may reside there: 2,048 threads


class Memory(Protocol):
    """What it needs of its device."""

    index: int

    def memory(self, nbytes: int, what: str) -> DeviceArray: ...

    def staging(self, nbytes: int) -> Array: ...

    def copy(self, target: Any, source: Any) -> None: ...

    def current(self) -> Stream: ...


class CupyLauncher:
    """See `kernels.cuda.launcher.Launcher`."""

    def __init__(self, device: Memory, cupy: Any) -> None:
        self._device, self._cupy = device, cupy
        runtime = cupy.cuda.runtime
        multiprocessors = runtime.deviceGetAttribute(runtime.cudaDevAttrMultiProcessorCount, device.index)
        self.most_workers: int = _WORKERS_OF_A_MULTIPROCESSOR * multiprocessors
        self._capability = int(cupy.cuda.Device(device.index).compute_capability)
        self._functions: dict[tuple[Any, ...], Any] = {}
        self._compiling = threading.Lock()

    def launch(self, source: str, kernel: str, defines: Defines, workers: int, *args: Any) -> None:
        if workers == 0:
            return
        key = source, kernel, *defines.items()
        function = self._functions.get(key)
        if function is None:
            function = self._compile(key, source, kernel, defines)
        blocks = -(-min(workers, self.most_workers) // _WORKERS_OF_A_BLOCK)
        function((blocks,), (_WORKERS_OF_A_BLOCK * _LANES,), args)

    def _compile(self, key: tuple[Any, ...], source: str, kernel: str, defines: Defines) -> Any:
        with self._compiling:
            if key not in self._functions:
                options = (*OPTIONS, *(f"-D{name}={value}" for name, value in sorted(defines.items())))
                path = binary(self._cupy, whole(source), options, self._capability, source)
                self._functions[key] = self._cupy.RawModule(path=path).get_function(kernel)
            return self._functions[key]

    def scratch(self, nbytes: int) -> Any:
        return self._device.memory(nbytes, "a kernel's scratch memory")

    def read(self, memory: Any, dtype: Any) -> Array:
        device = self._device
        there: Array = device.staging(memory.nbytes)
        device.copy(there, memory)
        wait_for(device.current().record(), lambda: None)
        return there.view(dtype)
