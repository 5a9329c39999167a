"""The late device and its arrays: copies and kernels are queued, and what they write is poison meanwhile."""

from __future__ import annotations

import ctypes
import math
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from commlib.buffers import shared_memory
from commlib.buffers.views import address_of
from commlib.devices.array import DeviceArray
from commlib.devices.protocol import UnreachableMemoryError
from commlib.devices.registry import register
from commlib.dtypes import Array, name_of, numpy_dtype
from commlib.errors import TransportError, UsageError
from tests.late.engine import Engine
from tests.late.exported import LateExported, LateOpened
from tests.late.kernels import LateKernels
from tests.late.memory import Owner, Reached, Release, place_of, poison_of
from tests.late.signals import LateSignals
from tests.late.stream import LateStream


class LateArray:
    """An array in the memory of the late device. It is no numpy array, and cannot become one by accident."""

    def __init__(self, device: LateDevice, address: int, shape: tuple[int, ...], dtype: Any, owner: Any) -> None:
        self.device, self.address, self.shape, self.dtype, self.owner = device, address, shape, np.dtype(dtype), owner

    def __repr__(self) -> str:
        return f"<LateArray {self.shape} {self.dtype}>"

    def __getitem__(self, key: slice) -> LateArray:
        part = self.device.wrap(self, "[]")[key]
        return LateArray(self.device, part.address, part.shape, part.dtype, self)

    def peek(self) -> Array:
        """Return the current values: poison if this thread's stream has not written them yet."""
        out = np.empty(self.shape, self.dtype)
        ctypes.memmove(address_of(out), self.address, out.nbytes)
        return out

    def numpy(self) -> Array:
        """Return the values once the work queued on this thread's stream has ended."""
        self.device.current().record().block()
        return self.peek()


class LateDevice:
    """See `devices.protocol.Device`. delay: seconds that every copy and kernel takes."""

    name = "late"
    kind = LateArray
    has_signals = False  # as of a GPU whose streams cannot wait for other processes
    has_reach = True  # False: as of one whose memory other processes cannot map

    def __init__(self, delay: float = 0.3e-3) -> None:
        self._engine, self._default, self._local = Engine(delay), LateStream(), threading.local()
        self.kernels = LateKernels(self)

    @property
    def delay(self) -> float:
        return self._engine.delay

    @delay.setter
    def delay(self, seconds: float) -> None:
        self._engine.delay = seconds

    @property
    def queued(self) -> int:
        """The number of copies and kernels so far."""
        return self._engine.queued

    @property
    def races(self) -> int:
        """The number of changes so far to memory that was being read."""
        return self._engine.races

    @contextmanager
    def careless(self, delay: float = 0.1) -> Iterator[None]:
        """Make all work slow within a `with`, and ignore its races: for tests that leave out a wait on purpose."""
        before, races, mark = self.delay, self.races, self._engine.mark()
        self.delay = delay
        try:
            yield
        finally:
            self._engine.drain(mark)
            self.delay, self._engine.races = before, races

    def stream(self) -> LateStream:
        return LateStream()

    def current(self) -> LateStream:
        return getattr(self._local, "stream", None) or self._default

    @contextmanager
    def using(self, stream: Any) -> Iterator[None]:
        before = self.current()
        self._local.stream = stream
        try:
            yield
        finally:
            self._local.stream = before

    def synchronise(self) -> None:
        """Wait for this thread's stream."""
        self.current().record().block()

    def empty(self, shape: int | tuple[int, ...], dtype: Any = "float32") -> LateArray:
        kind, lengths = numpy_dtype(dtype), (shape,) if isinstance(shape, int) else shape
        nbytes = math.prod(lengths) * kind.itemsize
        pool = np.full(max(nbytes, 1), poison_of(kind), np.uint8)
        array = LateArray(self, address_of(pool), lengths, kind, None)
        owner = Owner()
        # Like a real device's pool, it may reuse the memory as soon as the same stream gets there. The finalizer holds
        # the memory, which therefore outlives all work queued on this stream before.
        release = Release(pool, poison_of(kind))
        weakref.finalize(owner, self.current().queue.put, release).atexit = False
        array.owner = owner
        return array

    def put(self, values: Any) -> LateArray:
        """Return a copy of host values, which may be changed at once."""
        values = np.array(values, copy=True, order="C")
        array = self.empty(values.shape, values.dtype)
        self.copy(self.wrap(array, "put"), values)
        return array

    def fetch(self, array: LateArray) -> Array:
        """Return the values of an array once the work queued on this thread's stream has ended."""
        return array.numpy()

    def at(self, address: int, shape: tuple[int, ...], dtype: Any, owner: Any) -> LateArray:
        return LateArray(self, address, shape, dtype, owner)

    def wrap(self, x: Any, verb: str, what: str = "x", *, written: bool = False) -> DeviceArray:
        assert isinstance(x, LateArray) and x.device is self
        try:
            name_of(x.dtype)
        except UsageError as error:
            raise UsageError(f"{verb}: {what}: {error}") from None
        return DeviceArray(self, x.address, x.shape, x.dtype, x, self.current())

    def repeatable(self, run: Callable[[], None]) -> Callable[[], None]:
        return run

    def staging(self, nbytes: int) -> Array:
        return np.full(nbytes, 0xA5, np.uint8)

    def share(self, nbytes: int, rank: int, gather: Callable[[Any], list[Any]]) -> Any:
        if not all(gather(self.has_reach)):
            raise UnreachableMemoryError("late memory is not mapped by other ranks: has_reach is False on one of them")
        segment = shared_memory.share(rank, nbytes, gather)
        self._engine.note_shared(segment.mappings, nbytes)
        return segment

    def export(self, nbytes: int) -> LateExported:
        exported = LateExported(nbytes)
        self._engine.note_shared(exported.mappings, nbytes)
        return exported

    def open(self, handle: str) -> LateOpened:
        if not self.has_reach:
            raise TransportError("late memory is not opened by other ranks: has_reach is False")
        opened = LateOpened(handle)
        self._engine.note_shared(opened.mappings, opened.nbytes)
        return opened

    def reach(self, memory: Any) -> Any:
        reached = Reached(memory)
        self._engine.note_shared(reached.parts, memory.nbytes)
        return reached

    def signals(self, memory: Any, written: Sequence[int], awaited: Sequence[int]) -> LateSignals:
        if not self.has_signals:
            raise TransportError("late streams do not wait for those of other ranks: has_signals is False")
        return LateSignals(self, memory, written, awaited)

    def copy(self, target: Any, source: Any) -> None:
        if target.nbytes != source.nbytes:
            raise ValueError(f"{source.nbytes} bytes do not fit into {target.nbytes}")
        # Addresses only, as a real device takes them: it keeps no array alive.
        to, at, nbytes = place_of(target)[0], place_of(source)[0], target.nbytes
        self.submit([target], [source], lambda: ctypes.memmove(to, at, nbytes), whole=True)

    def submit(
        self,
        writes: Sequence[Any],
        reads: Sequence[Any],
        run: Callable[[], Any],
        *,
        whole: bool = False,
    ) -> None:
        """Queue work. whole: it writes all of `writes` without reading it, unless that is in `reads` too."""
        targets, sources = [place_of(x) for x in writes], [place_of(x) for x in reads]
        host_arrays = [
            x for x in (*writes, *reads) if isinstance(x, np.ndarray)
        ]  # host memory must not be freed meanwhile
        self._engine.submit(self.current(), targets, sources, run, whole=whole, objects=host_arrays)


LATE = LateDevice()
register("late", LateArray, lambda array: array.device, lambda: LATE)
