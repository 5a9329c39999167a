"""Memory of the stand-in for CuPy: its pool, pinned memory, arrays, and memory that other processes can open."""

from __future__ import annotations

import ctypes
import math
import os
import struct
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np

from commlib.buffers import dlpack
from commlib.buffers.shared_memory import Mapping, allocate
from commlib.buffers.views import address_of
from tests.cuda.standin_streams import ENGINE, GPUS, POISON, CUDARuntimeError, Stream, current, get_current_stream
from tests.late.memory import Release
from tests.late.stream import LateStream

VIOLATIONS: list[str] = []


class OutOfMemoryError(MemoryError):
    pass


class _Pool:
    """cupy.cuda.MemoryPool, as far as it can be queried."""

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
    """Memory of the pool. It may be reused as soon as the stream that allocated it gets there."""

    def __init__(self, size: int) -> None:
        if _pool.used + size > _pool.limit:
            raise OutOfMemoryError(f"Out of memory allocating {size} bytes (allocated so far: {_pool.used} bytes)")
        raw = np.full(size + 511, POISON, np.uint8)
        start = -address_of(raw) % 512
        self.ptr, self.size, self.device_id = address_of(raw) + start, size, current.device
        _pool.used += size
        weakref.finalize(self, _free_in_order, get_current_stream().late, raw, size).atexit = False


def _free_in_order(stream: LateStream, raw: Any, size: int) -> None:
    _pool.used -= size
    stream.queue.put(Release(raw, POISON))


class UnownedMemory:
    def __init__(self, ptr: int, size: int, owner: Any, device_id: int = -1) -> None:
        self.ptr, self.size, self._owner, self.device_id = ptr, size, owner, device_id


class MemoryPointer:
    def __init__(self, mem: Any, offset: int) -> None:
        self.mem, self.ptr, self.device_id = mem, mem.ptr + offset, mem.device_id


def alloc(size: int) -> MemoryPointer:
    return MemoryPointer(Memory(size), 0)


def alloc_pinned_memory(size: int) -> Any:
    """Return memory with the buffer protocol. When freed, it is reused at once, and overwritten."""
    raw = np.full(size, POISON, np.uint8)
    kind: Any = type("PinnedMemoryPointer", (ctypes.c_uint8 * size,), {})
    memory = kind.from_buffer(raw)
    weakref.finalize(memory, Release(raw, POISON)).atexit = False
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
        """Copy a host array here, in the stream's order; it may be changed at once."""
        copy = np.array(arr, self.dtype, order="C").reshape(self.shape)
        target = _place(self.data.ptr, self.nbytes)
        ENGINE.submit(
            get_current_stream().late, [target], [], lambda: ctypes.memmove(target[0], address_of(copy), copy.nbytes)
        )

    def get(self) -> Any:
        """Return the values once the work queued on this thread's stream has ended."""
        get_current_stream().synchronize()
        return self.peek()

    def peek(self) -> Any:
        """Return the current values (CuPy has no such method)."""
        out = np.empty(self.shape, self.dtype)
        ctypes.memmove(address_of(out), self.data.ptr, out.nbytes)
        return out


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


_allocated: dict[int, _Shared] = {}
_opened: dict[int, _Shared] = {}


def _malloc(size: int) -> int:
    libc = ctypes.CDLL(None)
    descriptor = libc.memfd_create(b"gpu", 1)
    path = f"/proc/{os.getpid()}/fd/{descriptor}"
    allocate(path, size + _Shared.HEADER)
    memory = _Shared(path, size, descriptor)
    ctypes.memset(memory.address, POISON, size)
    _allocated[memory.address] = memory
    return memory.address


def _free(ptr: int) -> None:
    memory = _allocated.pop(ptr)
    if others := memory.opened():
        VIOLATIONS.append(f"memory was freed that these processes had open: {others}")
    os.close(memory.descriptor)


def _ipc_get_handle(devPtr: int) -> bytes:
    memory = _allocated[devPtr]
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
    _opened[memory.address] = memory
    return memory.address


def _ipc_close_handle(devPtr: int) -> None:
    memory = _opened.pop(devPtr)
    memory.count(-1)


def _memset(ptr: int, value: int, size: int) -> None:
    ctypes.memset(ptr, value, size)


class _Registered:
    """Host memory that the GPU can address. Other processes may, too."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.address, self.nbytes = address, nbytes
        ENGINE.note_shared([self], nbytes)


registered: dict[int, _Registered] = {}


def _host_register(ptr: int, size: int, flags: int) -> None:
    if ptr % 4096 or flags != 3:
        raise CUDARuntimeError("cudaErrorInvalidValue: invalid argument")
    if ptr in registered:
        raise CUDARuntimeError("cudaErrorHostMemoryAlreadyRegistered: memory is registered")
    registered[ptr] = _Registered(ptr, size)


def _host_unregister(ptr: int) -> None:
    del registered[ptr]


runtime = SimpleNamespace(
    CUDARuntimeError=CUDARuntimeError,
    memcpyDefault=4,
    cudaDevAttrMultiProcessorCount=16,
    cudaDevAttrCanUseHostPointerForRegisteredMem=91,
    getDevice=lambda: current.device,
    getDeviceCount=lambda: GPUS,
    deviceGetAttribute=lambda attrib, device: {16: 2, 91: 1}[attrib],
    memGetInfo=lambda: (_pool.limit - _pool.used - sum(memory.nbytes for memory in _allocated.values()), _pool.limit),
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
