"""The late device and its arrays: copies and kernels are queued, and what they write is poison meanwhile."""

from __future__ import annotations

import ctypes
import itertools
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from commlib.buffers import shared_memory
from commlib.buffers.views import address_of
from commlib.devices.array import DeviceArray
from commlib.devices.registry import register
from commlib.dtypes import Array, name_of, numpy_dtype
from commlib.errors import UsageError
from tests.late.kernels import LateKernels
from tests.late.memory import GiveUp, Owner, Place, meet, place_of, poison_of
from tests.late.stream import LateStream


class LateArray:
    """An array in the memory of the late device. It is no numpy array, and nothing makes one of it by accident."""

    def __init__(self, device: LateDevice, address: int, shape: tuple[int, ...], dtype: Any, owner: Any) -> None:
        self.device, self.address, self.shape, self.dtype, self.owner = device, address, shape, np.dtype(dtype), owner

    def __repr__(self) -> str:
        return f"<LateArray {self.shape} {self.dtype}>"

    def __getitem__(self, key: slice) -> LateArray:
        part = self.device.wrap(self, "[]")[key]
        return LateArray(self.device, part.address, part.shape, part.dtype, self)

    def peek(self) -> Array:
        """Return what is there now: poison if this thread's stream has yet to come to it."""
        out = np.empty(self.shape, self.dtype)
        ctypes.memmove(address_of(out), self.address, out.nbytes)
        return out

    def numpy(self) -> Array:
        """Return the values, when what this thread's stream has been told so far is done."""
        self.device.current().record().block()
        return self.peek()


class LateDevice:
    """See `devices.protocol.Device`. delay: seconds that every copy and kernel takes."""

    name = "late"

    def __init__(self, delay: float = 0.3e-3) -> None:
        self.delay, self._default, self._local = delay, LateStream(), threading.local()
        self.kernels = LateKernels(self)
        self._lock = threading.Lock()
        self._pending: dict[int, list[Place]] = {}  # what queued work reads and writes
        self._shared: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # mappings, and their bytes
        self._numbers = itertools.count()
        self.queued = 0  # copies and kernels so far
        self.races = 0  # what changed while it was read

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
        # As a pool of a real device does, it may use the memory again as soon as the same stream comes to that. The
        # finalizer holds the memory, which so outlives all that was queued on this stream before.
        give_up = GiveUp(pool, poison_of(kind))
        weakref.finalize(owner, self.current().queue.put, give_up).atexit = False
        array.owner = owner
        return array

    def put(self, values: Any) -> LateArray:
        """Return a copy of host values, which may be changed at once."""
        values = np.array(values, copy=True, order="C")
        array = self.empty(values.shape, values.dtype)
        self.copy(self.wrap(array, "put"), values)
        return array

    def at(self, address: int, shape: tuple[int, ...], dtype: Any, owner: Any) -> LateArray:
        return LateArray(self, address, shape, dtype, owner)

    def wrap(self, x: Any, verb: str, what: str = "x", *, written: bool = False) -> DeviceArray:
        assert isinstance(x, LateArray) and x.device is self
        try:
            name_of(x.dtype)
        except UsageError as error:
            raise UsageError(f"{verb}: {what}: {error}") from None
        return DeviceArray(self, x.address, x.shape, x.dtype, x)

    def staging(self, nbytes: int) -> Array:
        return np.full(nbytes, 0xA5, np.uint8)

    def share(self, nbytes: int, rank: int, gather: Callable[[Any], list[Any]]) -> Any:
        segment = shared_memory.share(rank, nbytes, gather)
        with self._lock:
            self._shared.update(dict.fromkeys(segment.mappings, nbytes))
        return segment

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
        with self._lock:
            number = next(self._numbers)
            busy = [place for places in self._pending.values() for place in places]
            if whole and not any(meet(target, other) for target in targets for other in [*busy, *sources]):
                for target in targets:
                    ctypes.memset(target[0], target[2], target[1])
            self._pending[number] = [*targets, *sources]
            self.queued += 1
            # A driver unmaps what ranks share when nothing uses it any more.
            used = [
                mapping
                for mapping, nbytes in self._shared.items()
                if any(meet((mapping.address, nbytes, 0), place) for place in self._pending[number])
            ]

        kept = [x for x in (*writes, *reads) if isinstance(x, np.ndarray)]  # host memory must not go meanwhile

        def work() -> None:
            before = [ctypes.string_at(at, nbytes) for at, nbytes, _ in targets]
            read = [place for place in sources if not any(meet(place, target) for target in targets)]
            values = [ctypes.string_at(at, nbytes) for at, nbytes, _ in read]
            for at, nbytes, poison in targets:
                ctypes.memset(at, poison, nbytes)
            time.sleep(self.delay)
            if values == [ctypes.string_at(at, nbytes) for at, nbytes, _ in read]:
                for (at, nbytes, _), held in zip(targets, before, strict=True):
                    ctypes.memmove(at, held, nbytes)
                run()
            else:
                self.races += 1  # somebody wrote what was being read: the result stays poison
            with self._lock:
                del self._pending[number]
            kept.clear()
            used.clear()

        self.current().queue.put(work)


LATE = LateDevice()
register("late", LateArray, lambda array: array.device, lambda: LATE)
