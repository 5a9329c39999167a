"""CudaDevice: the GPU of this process behind the device protocol. See `devices.protocol.Device`."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import numpy as np

from commlib.buffers.views import address_of
from commlib.devices.array import DeviceArray
from commlib.devices.cuda import foreign_arrays
from commlib.devices.cuda.host_mapped import HostMapped
from commlib.devices.cuda.launch_tape import LaunchTape
from commlib.devices.cuda.launcher import CupyLauncher
from commlib.devices.cuda.peers import CudaExportedMemory, CudaOpenedMemory, GpuPeerMemory, share
from commlib.devices.cuda.signals import CudaSignals
from commlib.devices.cuda.stream import CudaEvent, CudaStream
from commlib.dtypes import KNOWN, Array, name_of
from commlib.errors import TransportError, UsageError
from commlib.kernels.protocol import Kernels
from commlib.protocols import SharedMemory


class CudaDevice:
    """One GPU, through CuPy, with CuPy's current stream and CuPy's memory pool.

    It accepts arrays of any library. The arrays that it makes are CuPy's.
    """

    name = "cuda"

    def __init__(self, cupy: Any, index: int) -> None:
        self.index, self._cupy, self._cuda = index, cupy, cupy.cuda
        self._gpu = self._cuda.Device(index)
        self._new_event = partial(self._cuda.Event, disable_timing=True)
        # Host memory of copies in flight, which its pool must not reuse yet.
        self._under_way: deque[tuple[CudaEvent, Array]] = deque()
        self._looking = threading.Lock()
        self.tape = LaunchTape()

    def makes(self, x: Any) -> bool:
        """Return whether an array has the type that this device makes: CuPy's."""
        return type(x) is self._cupy.ndarray

    def __repr__(self) -> str:
        return f"<CudaDevice {self.index}>"

    @cached_property
    def kernels(self) -> Kernels:
        from commlib.kernels.cuda.table import CudaKernels  # loads all kernels' sources, so only on first use

        return CudaKernels(CupyLauncher(self, self._cupy))

    def stream(self) -> CudaStream:
        with self._gpu:
            return CudaStream(self._cuda.Stream(non_blocking=True), self._gpu, self._new_event)

    def current(self) -> CudaStream:
        return CudaStream(self._cuda.get_current_stream(self.index), self._gpu, self._new_event)

    def existing(self, number: int) -> CudaStream:
        """Return another library's stream by its address."""
        stream = self._cuda.Stream
        if number == 0:
            return CudaStream(stream.null, self._gpu, self._new_event)
        return CudaStream(stream.from_external(_ForeignStream(number)), self._gpu, self._new_event)

    @contextmanager
    def using(self, stream: Any) -> Iterator[None]:
        with self._gpu, stream.raw:
            yield

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        kind = np.dtype(dtype)
        nbytes = math.prod(shape) * kind.itemsize
        return self._cupy.ndarray(shape, kind, memptr=self._allocate(nbytes, f"an array {shape} of {name_of(kind)}"))

    def memory(self, nbytes: int, what: str) -> DeviceArray:
        """Allocate memory (uint8) on the current stream. what: its purpose. Raises TransportError if there is none."""
        pointer = self._allocate(nbytes, what)
        return DeviceArray(self, pointer.ptr, (nbytes,), np.uint8, pointer)

    def _allocate(self, nbytes: int, what: str) -> Any:
        try:
            with self._gpu:
                return self._cuda.alloc(max(nbytes, 1))
        except self._cuda.memory.OutOfMemoryError as error:
            raise TransportError(
                f"no memory on GPU {self.index} for {nbytes} bytes, {what}: {self._memory_report()}"
            ) from error

    def _memory_report(self) -> str:
        """Describe the free and used memory, and how to free some."""
        pool = self._cupy.get_default_memory_pool()
        with self._gpu:
            free, total = self._cuda.runtime.memGetInfo()
        return (
            f"{free} of its {total} bytes are free; CuPy's pool holds {pool.total_bytes()}, of which "
            f"{pool.used_bytes()} are in use. Free the caches of other libraries (torch.cuda.empty_cache()) or of CuPy "
            "(cupy.get_default_memory_pool().free_all_blocks())"
        )

    def at(self, address: int, shape: tuple[int, ...], dtype: Any, owner: Any) -> Any:
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        memory = self._cuda.UnownedMemory(address, max(nbytes, 1), owner, self.index)
        return self._cupy.ndarray(shape, np.dtype(dtype), memptr=self._cuda.MemoryPointer(memory, 0))

    def wrap(self, x: Any, verb: str, what: str = "x", *, written: bool = False) -> DeviceArray:
        if self.makes(x):
            if x.dtype in KNOWN and x.flags.c_contiguous:
                return DeviceArray(self, x.data.ptr, x.shape, x.dtype, x, self.current())
            foreign = foreign_arrays.ForeignArray(x.data.ptr, x.shape, x.dtype, x.flags.c_contiguous)
        else:
            foreign = self._describe(x, verb, what, written)
        try:
            name_of(foreign.dtype)
        except UsageError as error:
            raise UsageError(f"{verb}: {what}: {error}") from None
        if not foreign.contiguous:
            raise UsageError(
                f"{verb}: {what} of shape {foreign.shape} is not contiguous, and GPU arrays are not copied implicitly: "
                "pass cupy.ascontiguousarray(x), or x.contiguous() in PyTorch"
            )
        if written and foreign.read_only:
            raise UsageError(f"{verb}: {what} is read-only, but the result is written to it: pass a writable array")
        owner = x if foreign.owner is None else (x, foreign.owner)
        return DeviceArray(self, foreign.address, foreign.shape, foreign.dtype, owner, self.current())

    def _describe(self, x: Any, verb: str, what: str, written: bool) -> foreign_arrays.ForeignArray:
        """Describe another library's array; make the current stream wait for its contents."""
        here = self.current()
        number = foreign_arrays.plain_number(here.raw.ptr)
        theirs = foreign_arrays.current_stream_of(x)
        try:
            if hasattr(type(x), "__dlpack__") and theirs is None:
                foreign = foreign_arrays.describe_dlpack(x, number)
                theirs, unknown = foreign.stream, True  # the library's later work may run on any stream
            else:
                foreign = foreign_arrays.describe_interface(x.__cuda_array_interface__)
                theirs, unknown = foreign.stream if theirs is None else theirs, False
        except UsageError as error:
            raise UsageError(f"{verb}: {what}: {error}") from None
        except Exception as error:  # library-specific, for example for tensors that require a gradient
            raise UsageError(f"{verb}: {what} of type {type(x).__name__} cannot be read: {error}") from error
        if written and (unknown or theirs not in (None, number)):
            at = "an unknown stream" if unknown else f"stream {theirs:#x}"
            raise UsageError(
                f"{verb}: {what}, a {type(x).__module__} array, is in use on {at}, but the result is written on the "
                f"current stream {number:#x}, and nothing would order the accesses: pass a CuPy array over it "
                "(cupy.from_dlpack), or make its stream CuPy's current one (with "
                "cupy.cuda.Stream.from_external(stream):); commlib_torch does this for PyTorch"
            )
        if theirs not in (None, number):
            assert theirs is not None
            here.wait(self.existing(theirs).record())
        return foreign

    def copy(self, target: Any, source: Any) -> None:
        if target.nbytes != source.nbytes:
            raise ValueError(f"{source.nbytes} bytes do not fit into {target.nbytes}")
        if target.nbytes == 0:
            return
        if self.tape.is_recording:
            assert not isinstance(target, np.ndarray) and not isinstance(source, np.ndarray), "host memory may be freed"
            self.tape.add(self._copy, target.address, source.address, target.nbytes)
            return
        here = self.current()
        with self._gpu:
            self._copy(here.raw.ptr, _at(target), _at(source), target.nbytes)
        if host := [array for array in (target, source) if isinstance(array, np.ndarray)]:
            event, in_flight = here.record(), self._under_way
            with self._looking:  # without it two threads could both pop after seeing one done event
                while in_flight and in_flight[0][0].done():
                    in_flight.popleft()
                in_flight.extend((event, array) for array in host)

    def _copy(self, stream: int, target: int, source: int, nbytes: int) -> None:
        runtime = self._cuda.runtime
        runtime.memcpyAsync(target, source, nbytes, runtime.memcpyDefault, stream)

    def repeatable(self, run: Callable[[], None]) -> Callable[[], None]:
        with self.tape.recording() as recording:
            run()
        if not recording.is_whole:
            return run
        current, gpu, index, queued = self._cuda.get_current_stream, self._gpu, self.index, recording.queued

        def again() -> None:
            stream = current(index).ptr
            with gpu:
                for queue, *arguments in queued:
                    queue(stream, *arguments)

        return again

    def staging(self, nbytes: int) -> Array:
        with self._gpu:
            return np.frombuffer(self._cuda.alloc_pinned_memory(max(nbytes, 1)), np.uint8, nbytes)

    def share(self, nbytes: int, rank: int, gather: Callable[[Any], list[Any]]) -> GpuPeerMemory:
        return share(self._cuda, self.index, nbytes, rank, gather)

    def export(self, nbytes: int) -> CudaExportedMemory:
        return CudaExportedMemory(self._cuda, self.index, nbytes)

    def open(self, handle: str) -> CudaOpenedMemory:
        return CudaOpenedMemory(self._cuda, self.index, handle)

    def reach(self, memory: SharedMemory) -> HostMapped:
        return HostMapped(self._gpu, self._cuda, memory)

    def signals(self, memory: SharedMemory, written: Sequence[int], awaited: Sequence[int]) -> CudaSignals:
        return CudaSignals(self._gpu, self._cuda, memory, written, awaited)


class _ForeignStream:
    """Another library's stream in the form that CuPy accepts."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._number


def _at(array: Any) -> int:
    return address_of(array) if isinstance(array, np.ndarray) else int(array.address)
