"""A stand-in for CuPy on machines without a GPU: as much of it as commlib uses, in host memory, with delayed work.

`install()` makes `import cupy` find it. The late device's engine runs queued work: until then the results are poison,
and so is memory that is new or was freed, pinned memory too. It is stricter than CuPy where that exposes faults:
kernels' arguments must be numpy scalars of the declared width, a process may not open its own IPC handle, and memory
may not be freed while another process has it open (see `VIOLATIONS`). Names and signatures are compared with the
real ones where CuPy is installed.
"""

from __future__ import annotations

import ctypes
import pickle
import sys
import weakref
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np

from commlib.devices.cuda import signals
from commlib.devices.cuda.signals import OPERATION, WRITE_VALUE_32
from tests.cuda import build
from tests.cuda.standin_memory import (
    VIOLATIONS,
    MemoryPointer,
    OutOfMemoryError,
    UnownedMemory,
    alloc,
    alloc_pinned_memory,
    get_default_memory_pool,
    ndarray,
    registered,
    runtime,
)
from tests.cuda.standin_streams import ENGINE, POISON, Device, Event, Stream, get_current_stream, numbers
from tests.late.engine import EVERYWHERE
from tests.late.signals import wait_for_words, write
from tests.late.stream import LateStream

__all__ = ["ENGINE", "POISON", "VIOLATIONS", "Device", "Event", "Nvrtc", "RawModule", "Stream", "install", "runtime"]


class Nvrtc:
    """cupy.cuda.nvrtc: its output is the text itself, which g++ compiles when it is loaded."""

    NVRTCError = type("NVRTCError", (RuntimeError,), {})
    _programs: ClassVar[dict[int, Any]] = {}

    @staticmethod
    def getVersion() -> tuple[int, int]:
        return 12, 9

    @staticmethod
    def getSupportedArchs() -> tuple[int, ...]:
        return 70, 80, 90

    @classmethod
    def createProgram(cls, src: str, name: str, headers: Any, include_names: Any) -> int:
        cls._programs[number := next(numbers)] = src
        return number

    @classmethod
    def compileProgram(cls, prog: int, options: tuple[str, ...]) -> None:
        assert all(option.startswith(("-D", "--std=", "--fmad=false", "-arch=sm_90")) for option in options), options
        assert "--fmad=false" in options
        defines = tuple(option[2:] for option in options if option.startswith("-D"))
        try:
            build.library(cls._programs[prog], defines)
        except AssertionError as error:
            raise cls.NVRTCError(str(error)) from error
        cls._programs[prog] = cls._programs[prog], defines

    @classmethod
    def getCUBIN(cls, prog: int) -> bytes:
        return pickle.dumps(cls._programs[prog])

    @classmethod
    def getPTX(cls, prog: int) -> bytes:
        return cls.getCUBIN(prog)

    @classmethod
    def destroyProgram(cls, prog: int) -> None:
        del cls._programs[prog]


class RawModule:
    """cupy.RawModule of the output of `Nvrtc`."""

    def __init__(self, code: str | None = None, *, path: str | None = None, options: tuple[str, ...] = ()) -> None:
        assert code is None and path is not None and not options, "CuPy flushes denormal numbers in what it compiles"
        self._library = build.library(*pickle.loads(Path(path).read_bytes()))

    def get_function(self, name: str) -> RawKernel:
        return RawKernel(self._library, name)


class RawKernel:
    """The result of `RawModule.get_function`."""

    by_number: ClassVar[weakref.WeakValueDictionary[int, RawKernel]] = weakref.WeakValueDictionary()

    def __init__(self, library: ctypes.CDLL, name: str) -> None:
        self._library, self.name = library, name
        self.kernel = SimpleNamespace(ptr=next(numbers))
        self.by_number[self.kernel.ptr] = self

    def __call__(self, grid: tuple[int, ...], block: tuple[int, ...], args: Any, *, shared_mem: int = 0) -> None:
        for arg in args:
            if not isinstance(arg, np.generic | np.ndarray):
                raise TypeError(f"{self.name}: an argument is a {type(arg).__name__}: give numpy scalars")
        self.submit(get_current_stream().late, grid[0], block[0], [np.array(arg) for arg in args])

    def submit(self, stream: LateStream, blocks: int, block: int, values: list[np.ndarray]) -> None:
        assert block <= 1024 and 0 < blocks < 1 << 31
        # Its arguments may be addresses, also of tables of addresses: work queued after it waits for it.
        ENGINE.submit(
            stream, [], [], lambda: build.run(self._library, self.name, blocks * block, values), used=[EVERYWHERE]
        )

    def values_at(self, pointers: int) -> list[np.ndarray]:
        """Return copies of a launch's arguments, given their addresses."""
        sizes = build.sizes(self._library, self.name)
        places = (ctypes.c_void_p * len(sizes)).from_address(pointers)
        return [np.array(np.void(ctypes.string_at(at, size))) for at, size in zip(places, sizes, strict=True)]


class driver:
    """cupy.cuda.driver."""

    @staticmethod
    def occupancyMaxActiveBlocksPerMultiprocessor(func: int, blockSize: int, dynamicSMemSize: int) -> int:
        assert func in RawKernel.by_number and dynamicSMemSize == 0
        return 2048 // blockSize

    @staticmethod
    def launchKernel(
        f: int, grid_dim_x: int, grid_dim_y: int, grid_dim_z: int, block_dim_x: int, block_dim_y: int, block_dim_z: int,
        shared_mem_bytes: int, stream: int, kernel_params: int, extra: int,
    ) -> None:  # fmt: skip
        assert (grid_dim_y, grid_dim_z, block_dim_y, block_dim_z, shared_mem_bytes, extra) == (1, 1, 1, 1, 0, 0)
        kernel = RawKernel.by_number[f]
        kernel.submit(Stream.known[stream], grid_dim_x, block_dim_x, kernel.values_at(kernel_params))


class Driver:
    """libcuda, as far as commlib calls it itself."""

    @staticmethod
    def cuStreamBatchMemOp_v2(stream: Any, count: Any, operations: Any, flags: Any) -> int:
        raw = (ctypes.c_uint8 * (OPERATION.itemsize * count.value)).from_address(operations.value)
        queued = np.frombuffer(raw, OPERATION).copy()  # the driver has read them when it returns
        for address in queued["address"]:
            if not any(at <= address and address + 4 <= at + each.nbytes for at, each in registered.items()):
                return 1  # CUDA_ERROR_INVALID_VALUE
        stream_of_work = Stream.known[stream.value or 0]
        for operation, address, value, _ in queued.tolist():
            work = write if operation == WRITE_VALUE_32 else wait_for_words
            stream_of_work.queue.put(partial(work, [address], value))
        return 0


def install() -> ModuleType:
    """Let `import cupy` find this, and the driver, for the rest of the process."""
    if not getattr(sys.modules.get("cupy"), "is_stand_in", False):
        signals.driver = Driver  # type: ignore[assignment]
        cuda = ModuleType("cupy.cuda")
        vars(cuda).update(
            Device=Device, Event=Event, Stream=Stream, runtime=runtime, driver=driver, nvrtc=Nvrtc, alloc=alloc,
            alloc_pinned_memory=alloc_pinned_memory, get_current_stream=get_current_stream, MemoryPointer=MemoryPointer,
            UnownedMemory=UnownedMemory, memory=SimpleNamespace(OutOfMemoryError=OutOfMemoryError),
        )  # fmt: skip
        cupy = ModuleType("cupy")
        vars(cupy).update(
            cuda=cuda, ndarray=ndarray, RawModule=RawModule, get_default_memory_pool=get_default_memory_pool,
            is_stand_in=True,
        )  # fmt: skip
        from tests.cuda import nccl_standin  # which needs this module

        cuda.nccl = nccl_standin.module()  # type: ignore[attr-defined]
        runtime.deviceGetPCIBusId = nccl_standin.bus_id
        sys.modules.update({"cupy": cupy, "cupy.cuda": cuda, "cupy.cuda.nccl": cuda.nccl})
    return sys.modules["cupy"]
