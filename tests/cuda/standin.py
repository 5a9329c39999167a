"""A stand-in for CuPy on machines without a GPU: as much of it as commlib uses, of host memory, with work that is late.

`install()` makes `import cupy` find it. What is queued is done by the engine of the late device: until then the results
are poison, and so is memory that is new or was given back, pinned memory too. It is stricter than CuPy where that lets
faults be seen: kernels' arguments must be numpy scalars of the declared width, a process may not open its own IPC
handle, and memory may not be freed while another process has it open (see `VIOLATIONS`). Names and signatures are
compared with the real ones where CuPy is installed.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import os
import pickle
import struct
import sys
import threading
import time
import weakref
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np

from commlib.buffers import dlpack
from commlib.buffers.shared_memory import Mapping, allocate
from commlib.buffers.views import address_of
from commlib.devices.cuda import signals
from commlib.devices.cuda.signals import OPERATION, WRITE_VALUE_32
from tests.cuda import build
from tests.late.engine import Engine
from tests.late.memory import GiveUp
from tests.late.signals import hear, tell
from tests.late.stream import LateEvent, LateStream

ENGINE = Engine(0.2e-3)
VIOLATIONS: list[str] = []

POISON = 0xFF  # NaN for floats
GPUS = 2

_numbers = itertools.count(0x1000, 0x10)


class CUDARuntimeError(RuntimeError):
    pass


class OutOfMemoryError(MemoryError):
    pass


class _Thread(threading.local):
    """What is current in a thread."""

    def __init__(self) -> None:
        self.device = 0
        self.streams: dict[int, Any] = {}


_thread = _Thread()


class Device:
    """cupy.cuda.Device."""

    def __init__(self, device: int | None = None) -> None:
        self.id = _thread.device if device is None else device
        if not 0 <= self.id < GPUS:
            raise CUDARuntimeError("cudaErrorInvalidDevice: invalid device ordinal")
        self._before: list[int] = []

    compute_capability = "90"

    def use(self) -> None:
        _thread.device = self.id

    def __enter__(self) -> Device:
        self._local().append(_thread.device)
        self.use()
        return self

    def __exit__(self, *args: object) -> None:
        _thread.device = self._local().pop()

    def _local(self) -> list[int]:  # one object may be entered by several threads
        entered: list[int] = _thread.__dict__.setdefault("entered", [])
        return entered


class Event:
    """cupy.cuda.Event."""

    def __init__(self, block: bool = False, disable_timing: bool = False, interprocess: bool = False) -> None:
        self.late: LateEvent | None = None

    def record(self, stream: Any = None) -> None:
        self.late = (get_current_stream() if stream is None else stream).late.record()

    @property
    def done(self) -> bool:
        return self.late is None or self.late.done()

    def synchronize(self) -> None:
        if self.late is not None:
            self.late.block()


class Stream:
    """cupy.cuda.Stream."""

    null: ClassVar[Stream]
    known: ClassVar[weakref.WeakValueDictionary[int, LateStream]] = weakref.WeakValueDictionary()

    def __init__(self, null: bool = False, non_blocking: bool = False, ptds: bool = False) -> None:
        self.late = LateStream()
        self.ptr = 0 if null else next(_numbers)
        Stream.known[self.ptr] = self.late

    @classmethod
    def from_external(cls, obj: Any) -> Stream:
        """Return another object for the same stream."""
        version, ptr = obj.__cuda_stream__()
        assert version == 0 and ptr > 1, "the default stream is Stream.null"
        stream = cls.__new__(cls)
        stream.ptr, stream.late = ptr, cls.known[ptr]
        return stream

    def record(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        if event.late is not None:
            self.late.wait(event.late)

    def synchronize(self) -> None:
        self.late.record().block()

    def __enter__(self) -> Stream:
        _thread.__dict__.setdefault("before", []).append(get_current_stream())
        _thread.streams[_thread.device] = self
        return self

    def __exit__(self, *args: object) -> None:
        _thread.streams[_thread.device] = _thread.__dict__["before"].pop()


Stream.null = Stream(null=True)


def get_current_stream(device_id: int = -1) -> Any:
    return _thread.streams.get(_thread.device if device_id == -1 else device_id, Stream.null)


class _Pool:
    """cupy.cuda.MemoryPool, as far as it can be asked."""

    def __init__(self) -> None:
        self.used, self.limit = 0, 1 << 40

    def used_bytes(self) -> int:
        return self.used

    def total_bytes(self) -> int:
        return self.used

    def set_limit(self, size: int | None = None) -> None:
        self.limit = size or 1 << 40


_pool = _Pool()


def get_default_memory_pool() -> _Pool:
    return _pool


class Memory:
    """Memory of the pool. It may be used again as soon as the stream on which it was made comes to its end."""

    def __init__(self, size: int) -> None:
        if _pool.used + size > _pool.limit:
            raise OutOfMemoryError(f"Out of memory allocating {size} bytes (allocated so far: {_pool.used} bytes)")
        raw = np.full(size + 511, POISON, np.uint8)
        start = -address_of(raw) % 512
        self.ptr, self.size, self.device_id = address_of(raw) + start, size, _thread.device
        _pool.used += size
        weakref.finalize(self, _give_up, get_current_stream().late, raw, size).atexit = False


def _give_up(stream: LateStream, raw: Any, size: int) -> None:
    _pool.used -= size
    stream.queue.put(GiveUp(raw, POISON))


class UnownedMemory:
    def __init__(self, ptr: int, size: int, owner: Any, device_id: int = -1) -> None:
        self.ptr, self.size, self._owner, self.device_id = ptr, size, owner, device_id


class MemoryPointer:
    def __init__(self, mem: Any, offset: int) -> None:
        self.mem, self.ptr, self.device_id = mem, mem.ptr + offset, mem.device_id


def alloc(size: int) -> MemoryPointer:
    return MemoryPointer(Memory(size), 0)


def alloc_pinned_memory(size: int) -> Any:
    """Return memory with the buffer protocol. When it is given up somebody else gets it, who writes to it at once."""
    raw = np.full(size, POISON, np.uint8)
    kind: Any = type("PinnedMemoryPointer", (ctypes.c_uint8 * size,), {})
    memory = kind.from_buffer(raw)
    weakref.finalize(memory, GiveUp(raw, POISON)).atexit = False
    return memory


class Flags:
    def __init__(self, contiguous: bool) -> None:
        self.c_contiguous = contiguous


class ndarray:
    """cupy.ndarray."""

    def __init__(
        self, shape: Any, dtype: Any = float, memptr: Any = None, strides: Any = None, order: str = "C"
    ) -> None:
        self.shape = (shape,) if isinstance(shape, int) else tuple(shape)
        self.dtype = np.dtype(dtype)
        self.data = alloc(max(self.nbytes, 1)) if memptr is None else memptr
        self.strides = strides
        self.flags = Flags(strides is None)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * int(self.dtype.itemsize)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.data.ptr, False),
            "version": 3,
            "strides": self.strides,
            "stream": get_current_stream().ptr or 1,
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        return dlpack.CUDA, self.data.mem.device_id

    def __getitem__(self, key: slice) -> ndarray:
        start, stop, step = key.indices(self.shape[0])
        assert step == 1
        row = math.prod(self.shape[1:]) * self.dtype.itemsize
        memory = MemoryPointer(self.data.mem, self.data.ptr - self.data.mem.ptr + start * row)
        return ndarray((stop - start, *self.shape[1:]), self.dtype, memory)

    def set(self, arr: Any) -> None:
        """Copy an array of the host here, in the stream's order; it may be changed at once."""
        kept = np.array(arr, self.dtype, order="C").reshape(self.shape)
        target = _place(self.data.ptr, self.nbytes)
        ENGINE.submit(
            get_current_stream().late, [target], [], lambda: ctypes.memmove(target[0], address_of(kept), kept.nbytes)
        )

    def get(self) -> Any:
        """Return the values, when what this thread's stream has been told so far is done."""
        get_current_stream().synchronize()
        return self.peek()

    def peek(self) -> Any:
        """Return what is there now (CuPy has no such thing)."""
        out = np.empty(self.shape, self.dtype)
        ctypes.memmove(address_of(out), self.data.ptr, out.nbytes)
        return out


class Nvrtc:
    """cupy.cuda.nvrtc: what it makes is the text itself, which g++ compiles when it is loaded."""

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
        cls._programs[number := next(_numbers)] = src
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
    """cupy.RawModule of what `Nvrtc` has made."""

    def __init__(self, code: str | None = None, *, path: str | None = None, options: tuple[str, ...] = ()) -> None:
        assert code is None and path is not None and not options, "CuPy flushes denormal numbers in what it compiles"
        self._library = build.library(*pickle.loads(Path(path).read_bytes()))

    def get_function(self, name: str) -> Any:
        def launch(grid: tuple[int, ...], block: tuple[int, ...], args: Any, *, shared_mem: int = 0) -> None:
            assert block[0] <= 1024 and 0 < grid[0] < 1 << 31
            for arg in args:
                if not isinstance(arg, np.generic | np.ndarray):
                    raise TypeError(f"{name}: an argument is a {type(arg).__name__}: give numpy scalars")
            values = [np.array(arg) for arg in args]
            threads = grid[0] * block[0]
            ENGINE.submit(get_current_stream().late, [], [], lambda: build.run(self._library, name, threads, values))

        return launch


def _place(address: int, nbytes: int) -> tuple[int, int, int]:
    return address, nbytes, POISON


def _memcpy_async(dst: int, src: int, size: int, kind: int, stream: int) -> None:
    assert kind == runtime.memcpyDefault
    late = Stream.known[stream]
    ENGINE.submit(late, [_place(dst, size)], [_place(src, size)], lambda: ctypes.memmove(dst, src, size), whole=True)


class _Shared:
    """Memory of cudaMalloc, which other processes can open. Its first page counts who has it open."""

    HEADER = 4096

    def __init__(self, path: str, nbytes: int, descriptor: int = -1) -> None:
        self.nbytes, self.descriptor = nbytes, descriptor
        self.mapping = Mapping(path, nbytes + self.HEADER)
        self.address: int = self.mapping.address + self.HEADER
        # Each process counts for itself: its number, and how often it has this open.
        self._counts = (ctypes.c_int64 * (self.HEADER // 8)).from_address(self.mapping.address)
        ENGINE.note_shared([self.mapping], nbytes + self.HEADER)

    def count(self, add: int) -> None:
        place = 2 * (os.getpid() % (len(self._counts) // 2))
        self._counts[place] = os.getpid()
        self._counts[place + 1] += add

    def opened(self) -> list[int]:
        """Return the processes that have it open."""
        pairs = zip(self._counts[::2], self._counts[1::2], strict=True)
        return [process for process, times in pairs if times and os.path.exists(f"/proc/{process}")]


_made: dict[int, _Shared] = {}
_open: dict[int, _Shared] = {}


def _malloc(size: int) -> int:
    libc = ctypes.CDLL(None)
    descriptor = libc.memfd_create(b"gpu", 1)
    path = f"/proc/{os.getpid()}/fd/{descriptor}"
    allocate(path, size + _Shared.HEADER)
    memory = _Shared(path, size, descriptor)
    ctypes.memset(memory.address, POISON, size)
    _made[memory.address] = memory
    return memory.address


def _free(ptr: int) -> None:
    memory = _made.pop(ptr)
    if others := memory.opened():
        VIOLATIONS.append(f"memory was freed that these processes had open: {others}")
    os.close(memory.descriptor)


def _ipc_get_handle(devPtr: int) -> bytes:
    memory = _made[devPtr]
    return struct.pack("<QQQ40x", os.getpid(), memory.descriptor, memory.nbytes)


def _ipc_open_handle(handle: bytes, flags: int = 1) -> int:
    process, descriptor, nbytes = struct.unpack("<QQQ40x", handle)
    if process == os.getpid():
        raise CUDARuntimeError("cudaErrorDeviceUninitialized: invalid device context")
    try:
        memory = _Shared(f"/proc/{process}/fd/{descriptor}", nbytes)
    except OSError as error:
        raise CUDARuntimeError(f"cudaErrorInvalidValue: {error}") from error
    memory.count(1)
    _open[memory.address] = memory
    return memory.address


def _ipc_close_handle(devPtr: int) -> None:
    memory = _open.pop(devPtr)
    memory.count(-1)


def _memset(ptr: int, value: int, size: int) -> None:
    ctypes.memset(ptr, value, size)


_registered: dict[int, int] = {}


def _host_register(ptr: int, size: int, flags: int) -> None:
    if ptr % 4096 or flags != 3:
        raise CUDARuntimeError("cudaErrorInvalidValue: invalid argument")
    if ptr in _registered:
        raise CUDARuntimeError("cudaErrorHostMemoryAlreadyRegistered: memory is registered")
    _registered[ptr] = size


def _host_unregister(ptr: int) -> None:
    del _registered[ptr]


runtime = SimpleNamespace(
    CUDARuntimeError=CUDARuntimeError,
    memcpyDefault=4,
    cudaDevAttrMultiProcessorCount=16,
    cudaDevAttrCanUseHostPointerForRegisteredMem=91,
    getDevice=lambda: _thread.device,
    getDeviceCount=lambda: GPUS,
    deviceGetAttribute=lambda attrib, device: {16: 2, 91: 1}[attrib],
    memGetInfo=lambda: (_pool.limit - _pool.used - sum(memory.nbytes for memory in _made.values()), _pool.limit),
    memcpyAsync=_memcpy_async,
    memset=_memset,
    malloc=_malloc,
    free=_free,
    hostRegister=_host_register,
    hostUnregister=_host_unregister,
    ipcGetMemHandle=_ipc_get_handle,
    ipcOpenMemHandle=_ipc_open_handle,
    ipcCloseMemHandle=_ipc_close_handle,
)


class Driver:
    """libcuda, as far as commlib calls it itself."""

    @staticmethod
    def cuStreamBatchMemOp_v2(stream: Any, count: Any, operations: Any, flags: Any) -> int:
        raw = (ctypes.c_uint8 * (OPERATION.itemsize * count.value)).from_address(operations.value)
        queued = np.frombuffer(raw, OPERATION).copy()  # the driver has read them when it returns
        for address in queued["address"]:
            if not any(start <= address and address + 4 <= start + size for start, size in _registered.items()):
                return 1  # CUDA_ERROR_INVALID_VALUE
        late = Stream.known[stream.value or 0]
        for operation, address, value, _ in queued.tolist():
            work = tell if operation == WRITE_VALUE_32 else hear
            late.queue.put(partial(work, [address], value))
        return 0


def install() -> ModuleType:
    """Let `import cupy` find this, and the driver, for the rest of the process."""
    if not getattr(sys.modules.get("cupy"), "is_stand_in", False):
        signals.driver = Driver  # type: ignore[assignment]
        cuda = ModuleType("cupy.cuda")
        vars(cuda).update(
            Device=Device, Event=Event, Stream=Stream, runtime=runtime, nvrtc=Nvrtc, alloc=alloc,
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


def settle() -> None:
    """Wait until nothing that was queued on any stream is left."""
    deadline = time.monotonic() + 20
    for stream in list(Stream.known.values()):
        stream.record().block()
        assert time.monotonic() < deadline
