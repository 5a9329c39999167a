"""CudaDevice: the GPU of this process as the seam asks for it. See `devices.protocol.Device`."""

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
from commlib.devices.cuda import foreign
from commlib.devices.cuda.launcher import CupyLauncher
from commlib.devices.cuda.peers import Exported, Opened, PeerMemory, share
from commlib.devices.cuda.reached import Reached
from commlib.devices.cuda.signals import CudaSignals
from commlib.devices.cuda.stream import CudaEvent, CudaStream
from commlib.devices.cuda.tape import Tape
from commlib.dtypes import KNOWN, Array, name_of
from commlib.errors import TransportError, UsageError
from commlib.kernels.protocol import Kernels
from commlib.protocols import SharedMemory


class CudaDevice:
    """One GPU, by way of CuPy: its current stream is this thread's, its pool gives the memory.

    Arrays are those of any library; what the device makes itself are CuPy's.
    """

    name = "cuda"

    def __init__(self, cupy: Any, index: int) -> None:
        self.index, self._cupy, self._cuda = index, cupy, cupy.cuda
        self._gpu = self._cuda.Device(index)
        self._new_event = partial(self._cuda.Event, disable_timing=True)
        # Host memory of copies under way: its pool would give it to somebody else.
        self._under_way: deque[tuple[CudaEvent, Array]] = deque()
        self._looking = threading.Lock()
        self.tape = Tape()

    def makes(self, x: Any) -> bool:
        """Return whether an array is one of CuPy's, as those are that it makes itself."""
        return type(x) is self._cupy.ndarray

    def __repr__(self) -> str:
        return f"<CudaDevice {self.index}>"

    @cached_property
    def kernels(self) -> Kernels:
        from commlib.kernels.cuda.table import CudaKernels  # with all kernels' sources: only where one is asked for

        return CudaKernels(CupyLauncher(self, self._cupy))

    def stream(self) -> CudaStream:
        with self._gpu:
            return CudaStream(self._cuda.Stream(non_blocking=True), self._gpu, self._new_event)

    def current(self) -> CudaStream:
        return CudaStream(self._cuda.get_current_stream(self.index), self._gpu, self._new_event)

    def existing(self, number: int) -> CudaStream:
        """Return a stream that another library has made, by its address."""
        stream = self._cuda.Stream
        if number == 0:
            return CudaStream(stream.null, self._gpu, self._new_event)
        return CudaStream(stream.from_external(_Numbered(number)), self._gpu, self._new_event)

    @contextmanager
    def using(self, stream: Any) -> Iterator[None]:
        with self._gpu, stream.raw:
            yield

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        kind = np.dtype(dtype)
        nbytes = math.prod(shape) * kind.itemsize
        return self._cupy.ndarray(shape, kind, memptr=self._allocate(nbytes, f"an array {shape} of {name_of(kind)}"))

    def memory(self, nbytes: int, what: str) -> DeviceArray:
        """Return memory of the current stream (uint8). what: it is for. Raises TransportError if there is none."""
        pointer = self._allocate(nbytes, what)
        return DeviceArray(self, pointer.ptr, (nbytes,), np.uint8, pointer)

    def _allocate(self, nbytes: int, what: str) -> Any:
        try:
            with self._gpu:
                return self._cuda.alloc(max(nbytes, 1))
        except self._cuda.memory.OutOfMemoryError as error:
            raise TransportError(f"no memory on GPU {self.index} for {nbytes} bytes, {what}: {self._left()}") from error

    def _left(self) -> str:
        """Say who has how much, and what helps."""
        pool = self._cupy.get_default_memory_pool()
        with self._gpu:
            free, total = self._cuda.runtime.memGetInfo()
        return (
            f"{free} of its {total} bytes are free; CuPy's pool holds {pool.total_bytes()}, of which it uses "
            f"{pool.used_bytes()}. What other libraries keep is freed by them (torch.cuda.empty_cache()), what CuPy "
            "keeps by cupy.get_default_memory_pool().free_all_blocks()"
        )

    def at(self, address: int, shape: tuple[int, ...], dtype: Any, owner: Any) -> Any:
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        memory = self._cuda.UnownedMemory(address, max(nbytes, 1), owner, self.index)
        return self._cupy.ndarray(shape, np.dtype(dtype), memptr=self._cuda.MemoryPointer(memory, 0))

    def wrap(self, x: Any, verb: str, what: str = "x", *, written: bool = False) -> DeviceArray:
        if self.makes(x):
            if x.dtype in KNOWN and x.flags.c_contiguous:
                return DeviceArray(self, x.data.ptr, x.shape, x.dtype, x, self.current())
            there = foreign.Described(x.data.ptr, x.shape, x.dtype, x.flags.c_contiguous)
        else:
            there = self._described(x, verb, what, written)
        try:
            name_of(there.dtype)
        except UsageError as error:
            raise UsageError(f"{verb}: {what}: {error}") from None
        if not there.contiguous:
            raise UsageError(
                f"{verb}: {what} of shape {there.shape} is not contiguous: on a GPU nothing is copied unasked; pass "
                "cupy.ascontiguousarray(x), or x.contiguous() in PyTorch"
            )
        if written and there.read_only:
            raise UsageError(f"{verb}: {what} is read-only, but the result is written to it: pass a writable array")
        owner = x if there.keep is None else (x, there.keep)
        return DeviceArray(self, there.address, there.shape, there.dtype, owner, self.current())

    def _described(self, x: Any, verb: str, what: str, written: bool) -> foreign.Described:
        """Describe another library's array, in order with the current stream."""
        here = self.current()
        number = foreign.plain_number(here.raw.ptr)
        theirs = foreign.current_of(x)
        try:
            if hasattr(type(x), "__dlpack__") and theirs is None:
                there = foreign.by_dlpack(x, number)
                theirs, unknown = there.stream, True  # where the library goes on
            else:
                there = foreign.by_interface(x.__cuda_array_interface__)
                theirs, unknown = there.stream if theirs is None else theirs, False
        except UsageError as error:
            raise UsageError(f"{verb}: {what}: {error}") from None
        except Exception as error:  # each library raises its own, for example for tensors that need a gradient
            raise UsageError(f"{verb}: {what} of type {type(x).__name__} cannot be read: {error}") from error
        if written and (unknown or theirs not in (None, number)):
            at = "a stream that is not known here" if unknown else f"stream {theirs:#x}"
            raise UsageError(
                f"{verb}: {what}, a {type(x).__module__} array, is written, and used on {at}, while the current one is "
                f"{number:#x}: pass a CuPy array over it (cupy.from_dlpack), or make its stream CuPy's current one "
                "(with cupy.cuda.Stream.from_external(stream):); commlib_torch does that for PyTorch"
            )
        if theirs not in (None, number):
            assert theirs is not None
            here.wait(self.existing(theirs).record())
        return there

    def copy(self, target: Any, source: Any) -> None:
        if target.nbytes != source.nbytes:
            raise ValueError(f"{source.nbytes} bytes do not fit into {target.nbytes}")
        if target.nbytes == 0:
            return
        if self.tape.is_recording:
            assert not isinstance(target, np.ndarray) and not isinstance(source, np.ndarray), "the host's may be gone"
            self.tape.add(self._copy, target.address, source.address, target.nbytes)
            return
        here = self.current()
        with self._gpu:
            self._copy(here.raw.ptr, _at(target), _at(source), target.nbytes)
        if host := [array for array in (target, source) if isinstance(array, np.ndarray)]:
            there, kept = here.record(), self._under_way
            with self._looking:  # else two threads that see the first one done would take the second one, too
                while kept and kept[0][0].done():
                    kept.popleft()
                kept.extend((there, array) for array in host)

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

    def share(self, nbytes: int, rank: int, gather: Callable[[Any], list[Any]]) -> PeerMemory:
        return share(self._cuda, self.index, nbytes, rank, gather)

    def export(self, nbytes: int) -> Exported:
        return Exported(self._cuda, self.index, nbytes)

    def open(self, handle: str) -> Opened:
        return Opened(self._cuda, self.index, handle)

    def reach(self, memory: SharedMemory) -> Reached:
        return Reached(self._gpu, self._cuda, memory)

    def signals(self, memory: SharedMemory, tell: Sequence[int], hear: Sequence[int]) -> CudaSignals:
        return CudaSignals(self._gpu, self._cuda, memory, tell, hear)


class _Numbered:
    """A stream of another library as CuPy takes it."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._number


def _at(array: Any) -> int:
    return address_of(array) if isinstance(array, np.ndarray) else int(array.address)
