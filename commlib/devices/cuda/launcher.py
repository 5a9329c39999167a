"""CupyLauncher: load kernels compiled for this GPU, and launch them on the current stream."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from commlib.devices.array import DeviceArray
from commlib.devices.cuda.binaries import binary
from commlib.devices.cuda.launch_tape import LaunchTape
from commlib.devices.protocol import Stream
from commlib.devices.waiting import wait_for
from commlib.dtypes import Array
from commlib.kernels.cuda.launcher import Defines
from commlib.kernels.cuda.sources import OPTIONS, expand_source

_LANES = 32  # threads of a worker
_WORKERS_OF_A_BLOCK = 8
_THREADS = _WORKERS_OF_A_BLOCK * _LANES


class LauncherDevice(Protocol):
    """The part of `CudaDevice` that the launcher uses."""

    index: int
    tape: LaunchTape

    def memory(self, nbytes: int, what: str) -> DeviceArray: ...

    def staging(self, nbytes: int) -> Array: ...

    def copy(self, target: Any, source: Any) -> None: ...

    def current(self) -> Stream: ...


class CupyLauncher:
    """A `kernels.cuda.launcher.Launcher` by CuPy."""

    def __init__(self, device: LauncherDevice, cupy: Any) -> None:
        self._device, self._cupy = device, cupy
        runtime = cupy.cuda.runtime
        self._multiprocessors: int = runtime.deviceGetAttribute(runtime.cudaDevAttrMultiProcessorCount, device.index)
        self._capability = int(cupy.cuda.Device(device.index).compute_capability)
        # By kernel: the function and the most blocks that are resident at once. More blocks would only start late.
        self._functions: dict[tuple[Any, ...], tuple[Any, int]] = {}
        self._driver = cupy.cuda.driver
        self._compiling = threading.Lock()

    def launch(self, source: str, kernel: str, defines: Defines, workers: int, *args: Any) -> None:
        if workers == 0:
            return
        key = source, kernel, *defines.items()
        function, most = self._functions.get(key) or self._compile(key, source, kernel, defines)
        blocks = min(-(-workers // _WORKERS_OF_A_BLOCK), most)
        if self._device.tape.is_recording:
            self._device.tape.add(_Launch(self._driver.launchKernel, function, blocks, args))
        else:
            function((blocks,), (_THREADS,), args)

    def _compile(self, key: tuple[Any, ...], source: str, kernel: str, defines: Defines) -> tuple[Any, int]:
        with self._compiling:
            if key not in self._functions:
                options = (*OPTIONS, *(f"-D{name}={value}" for name, value in sorted(defines.items())))
                path = binary(self._cupy, expand_source(source), options, self._capability, source)
                function = self._cupy.RawModule(path=path).get_function(kernel)
                resident = self._driver.occupancyMaxActiveBlocksPerMultiprocessor(function.kernel.ptr, _THREADS, 0)
                self._functions[key] = function, resident * self._multiprocessors
            return self._functions[key]

    def scratch(self, nbytes: int) -> Any:
        self._device.tape.note_memory()
        return self._device.memory(nbytes, "a kernel's scratch memory")

    def read(self, memory: Any, dtype: Any) -> Array:
        device = self._device
        assert not device.tape.is_recording, "a recording has no results for the host to read"
        block: Array = device.staging(memory.nbytes)
        device.copy(block, memory)
        wait_for(device.current().record(), lambda: None)
        return block.view(dtype)


class _Launch:
    """A kernel launch with its arguments packed for the driver: cheaper than CuPy's function call."""

    __slots__ = ("_blocks", "_function", "_handle", "_kept", "_pointers", "_queue")

    def __init__(self, queue: Callable[..., None], function: Any, blocks: int, args: tuple[Any, ...]) -> None:
        self._queue, self._blocks = queue, blocks
        self._function, self._handle = function, function.kernel.ptr  # valid while the function lives
        held = [np.array(arg) for arg in args]
        array = (ctypes.c_void_p * len(held))(*(arg.ctypes.data for arg in held))
        self._kept, self._pointers = (held, array), ctypes.addressof(array)

    def __call__(self, stream: int) -> None:
        self._queue(self._handle, self._blocks, 1, 1, _THREADS, 1, 1, 0, stream, self._pointers, 0)
