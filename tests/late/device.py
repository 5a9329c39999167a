"""A device for tests, in host memory: what is queued happens late, and until then the result is poison.

A copy or kernel reads its sources while it runs, not when it is queued; if they change meanwhile its result is poison.
What it writes is poison from when it is queued, where that disturbs nothing queued before it, or else from when it
begins. New memory is poison, and so is memory that is given up, once its stream has come to that. Reading on the host
(`LateArray.peek`) waits for nothing: whoever forgets a wait gets poison. Floats are then NaN, all else is 0xA5.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import numpy as np

from commlib.buffers import shared_memory
from commlib.buffers.views import address_of
from commlib.devices.array import DeviceArray
from commlib.devices.registry import register
from commlib.dtypes import FLOATS, Array, name_of, numpy_dtype
from commlib.errors import UsageError
from commlib.kernels.host.table import HostKernels
from commlib.kernels.protocol import Code, Fault, Value

Place = tuple[int, int, int]
"""Memory: its address, its bytes, and the byte that is poison there."""


def _poison_of(dtype: Any) -> int:
    return 0xFF if name_of(dtype) in (*FLOATS, "complex64", "complex128") else 0xA5


def _place(array: Any) -> Place:
    at = array.address if isinstance(array, DeviceArray) else address_of(array)
    return at, array.nbytes, _poison_of(array.dtype)


def _meet(a: Place, b: Place) -> bool:
    return a[0] < b[0] + b[1] and b[0] < a[0] + a[1]


class LateEvent:
    """See `devices.protocol.Event`."""

    def __init__(self) -> None:
        self._happened = threading.Event()

    def done(self) -> bool:
        return self._happened.is_set()

    def happen(self) -> None:
        self._happened.set()

    def block(self) -> None:
        if not self._happened.wait(20):
            raise TimeoutError("an event of the late device did not happen within 20 s")


def _serve(queue: SimpleQueue[Callable[[], None] | None]) -> None:
    while (work := queue.get()) is not None:
        work()
        del work  # an idle stream keeps nothing alive


class LateStream:
    """A thread that does what is queued, one after the other. See `devices.protocol.Stream`."""

    def __init__(self) -> None:
        self.queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=_serve, args=(self.queue,), name="late stream", daemon=True).start()
        weakref.finalize(self, self.queue.put, None).atexit = False

    def record(self) -> LateEvent:
        event = LateEvent()
        self.queue.put(event.happen)
        return event

    def wait(self, event: Any) -> None:
        self.queue.put(event.block)


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
        pool = np.full(max(nbytes, 1), _poison_of(kind), np.uint8)
        array = LateArray(self, address_of(pool), lengths, kind, None)
        owner = _Owner()
        # As a pool of a real device does, it may use the memory again as soon as the same stream comes to that. The
        # finalizer holds the memory, which so outlives all that was queued on this stream before.
        give_up = _GiveUp(pool, _poison_of(kind))
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
        return shared_memory.share(rank, nbytes, gather)

    def copy(self, target: Any, source: Any) -> None:
        if target.nbytes != source.nbytes:
            raise ValueError(f"{source.nbytes} bytes do not fit into {target.nbytes}")
        # Addresses only, as a real device takes them: it keeps no array alive.
        to, at, nbytes = _place(target)[0], _place(source)[0], target.nbytes
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
        targets, sources = [_place(x) for x in writes], [_place(x) for x in reads]
        with self._lock:
            number = next(self._numbers)
            busy = [place for places in self._pending.values() for place in places]
            if whole and not any(_meet(target, other) for target in targets for other in [*busy, *sources]):
                for target in targets:
                    ctypes.memset(target[0], target[2], target[1])
            self._pending[number] = [*targets, *sources]
            self.queued += 1

        kept = [x for x in (*writes, *reads) if isinstance(x, np.ndarray)]  # host memory must not go meanwhile

        def work() -> None:
            before = [ctypes.string_at(at, nbytes) for at, nbytes, _ in targets]
            read = [place for place in sources if not any(_meet(place, target) for target in targets)]
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

        self.current().queue.put(work)


class _Owner:
    """Who holds memory; its end gives it up."""


class _GiveUp:
    """Poison memory that was given up, in the stream's order."""

    def __init__(self, pool: Array, poison: int) -> None:
        self._pool, self._poison = pool, poison

    def __call__(self) -> None:
        self._pool.fill(self._poison)
        _graveyard.append(self._pool)  # a write that comes too late hits nothing else
        del _graveyard[:-1000]


_graveyard: list[Array] = []


class LateKernels:
    """The host's kernels, late. See `kernels.protocol.Kernels`."""

    def __init__(self, device: LateDevice) -> None:
        self._device, self._host = weakref.ref(device), HostKernels()

    def _queue(self, writes: Sequence[Any], reads: Sequence[Any], run: Callable[[], Any], whole: bool = False) -> None:
        device = self._device()
        assert device is not None
        device.submit(_given(writes), _given(reads), run, whole=whole)

    def _now(self, writes: Sequence[Any], reads: Sequence[Any], run: Callable[[], Any]) -> Any:
        found: list[Any] = []
        self._queue(writes, reads, lambda: found.append(run()))
        device = self._device()
        assert device is not None
        device.synchronise()
        assert found, "what a kernel reads changed while it ran"
        return found[0]

    def reduce(self, dtype: str, operation: str, divisor: int, operands: Sequence[Any], target: Any) -> None:
        whole = all(operand.address != target.address for operand in operands)
        bare, to = [_bare(operand) for operand in operands], _bare(target)
        self._queue([target], operands, lambda: self._host.reduce(dtype, operation, divisor, bare, to), whole)

    def cast(self, source: Any, target: Any) -> None:
        bare, to = _bare(source), _bare(target)
        self._queue([target], [source], lambda: self._host.cast(bare, to), True)

    def fill(self, target: Any, value: int) -> None:
        to = _bare(target)
        self._queue([target], [], lambda: self._host.fill(to, value), True)

    def scale(self, target: Any, factor: float) -> None:
        to = _bare(target)
        self._queue([target], [], lambda: self._host.scale(to, factor))

    def pack(self, sources: Sequence[Any], target: Any) -> None:
        bare, to = [_bare(source) for source in sources], _bare(target)
        self._queue([target], sources, lambda: self._host.pack(bare, to))

    def unpack(self, source: Any, targets: Sequence[Any]) -> None:
        bare, to = _bare(source), [_bare(target) for target in targets]
        self._queue(targets, [source], lambda: self._host.unpack(bare, to), True)

    def squares(self, x: Any) -> float:
        return float(self._now([], [x], lambda: self._host.squares(x)))

    def is_finite(self, x: Any) -> bool:
        return bool(self._now([], [x], lambda: self._host.is_finite(x)))

    def narrow(self, x: Any, before: Any, after: Any, payload: Any, bfloat: bool) -> None:
        a = _bare(x), _bare(before), _bare(after), _bare(payload)
        self._queue([payload, after], [x, before], lambda: self._host.narrow(*a, bfloat))

    def widen(self, payload: Any, out: Any, bfloat: bool, add: bool) -> None:
        a = _bare(payload), _bare(out)
        self._queue([out], [payload], lambda: self._host.widen(*a, bfloat, add), not add)

    def quantise(self, x: Any, before: Any, after: Any, payload: Any, *options: Any) -> None:
        a = _bare(x), _bare(before), _bare(after), _bare(payload)
        self._queue([payload, after], [x, before], lambda: self._host.quantise(*a, *options))

    def restore(self, payload: Any, out: Any, block: int, code: Code, add: bool) -> None:
        a = _bare(payload), _bare(out)
        self._queue([out], [payload], lambda: self._host.restore(*a, block, code, add), not add)

    def signs(self, x: Any, before: Any, after: Any, payload: Any, block: int) -> None:
        a = _bare(x), _bare(before), _bare(after), _bare(payload)
        self._queue([payload, after], [x, before], lambda: self._host.signs(*a, block))

    def unsign(self, payload: Any, out: Any, block: int, add: bool) -> None:
        a = _bare(payload), _bare(out)
        self._queue([out], [payload], lambda: self._host.unsign(*a, block, add), not add)

    def largest(self, x: Any, before: Any, after: Any, k: int, value: Value, payload: Any) -> int:
        run = lambda: self._host.largest(x, before, after, k, value, payload)  # noqa: E731
        return int(self._now([payload, after], [x, before], run))

    def random(self, x: Any, before: Any, after: Any, k: int, seed: int, scale: float, payload: Any) -> int:
        run = lambda: self._host.random(x, before, after, k, seed, scale, payload)  # noqa: E731
        return int(self._now([payload, after], [x, before], run))

    def read_sparse(self, payload: Any, value: Value, out: Any, add: bool) -> Fault:
        found: Fault = self._now([out], [payload], lambda: self._host.read_sparse(payload, value, out, add))
        return found

    def draw(self, count: int, seed: int, places: Any) -> None:
        to = _bare(places)
        self._queue([places], [], lambda: self._host.draw(count, seed, to), True)

    def take(self, x: Any, before: Any, after: Any, places: Any, scale: float, values: Any) -> None:
        a, at, to = (_bare(x), _bare(before), _bare(after)), _bare(places), _bare(values)
        self._queue([values, after], [x, before, places], lambda: self._host.take(*a, at, scale, to))

    def place(self, values: Any, places: Any, out: Any) -> None:
        a, at, to = _bare(values), _bare(places), _bare(out)
        self._queue([out], [values, places], lambda: self._host.place(a, at, to))

    def add_momentum(self, gradient: Any, u: Any, u_after: Any, *how: Any) -> None:
        a = [_bare(array) for array in (gradient, u, u_after)]
        self._queue([gradient, u_after], [u], lambda: self._host.add_momentum(*a, *how))

    def accumulate(self, gradient: Any, u: Any, v: Any, u_after: Any, v_after: Any, *how_and_payload: Any) -> int:
        run = lambda: self._host.accumulate(gradient, u, v, u_after, v_after, *how_and_payload)  # noqa: E731
        return int(self._now([u_after, v_after, how_and_payload[-1]], [gradient, u, v], run))

    def orthonormalise(self, vectors: Any, rank: int, epsilon: float) -> int:
        return int(self._now([vectors], [], lambda: self._host.orthonormalise(vectors, rank, epsilon)))

    def project(self, matrix: Any, before: Any, rows: int, cols: int, right: Any, left: Any, rank: int) -> None:
        m, b, r, to = map(_bare, (matrix, before, right, left))
        self._queue([matrix, left], [before, right], lambda: self._host.project(m, b, rows, cols, r, to, rank))

    def project_back(self, matrix: Any, rows: int, cols: int, left: Any, right: Any, rank: int) -> None:
        m, own, to = map(_bare, (matrix, left, right))
        run = lambda: self._host.project_back(m, rows, cols, own, to, rank)  # noqa: E731
        self._queue([right], [matrix, left], run, True)

    def expand(self, matrix: Any, after: Any, rows: int, cols: int, *factors_and_rank: Any) -> None:
        *factors, rank = factors_and_rank
        m, a, (left, right, own) = _bare(matrix), _bare(after), map(_bare, factors)
        run = lambda: self._host.expand(m, a, rows, cols, left, right, own, rank)  # noqa: E731
        self._queue([matrix, after], factors, run)


def _given(arrays: Sequence[Any]) -> list[Any]:
    return [array for array in arrays if array is not None]


def _bare(array: Any) -> Any:
    """Return the array without what keeps its memory alive: a real device has addresses only."""
    if array is None:
        return None
    return DeviceArray(array.device, array.address, array.shape, array.dtype, None, array.stream)


LATE = LateDevice()
register("late", LateArray, lambda array: array.device, lambda: LATE)


class OnDevice:
    """A Communicator, or Twins of one, called with arrays of a device: for test bodies that know numpy's only.

    Arguments are copied there, and back from there once the call has run; results are copied back.
    """

    def __init__(self, comm: Any, device: LateDevice = LATE) -> None:
        self.rank, self.size, self._comm, self._device = comm.rank, comm.size, comm, device

    def __getattr__(self, verb: str) -> Any:
        method, device = getattr(self._comm, verb), self._device

        def run(*args: Any, **options: Any) -> Any:
            there: dict[int, tuple[Array, LateArray]] = {}

            def put(value: Any) -> Any:
                if not isinstance(value, np.ndarray):
                    return value
                if id(value) not in there:
                    there[id(value)] = value, device.put(value)
                return there[id(value)][1]

            got = method(*map(put, args), **{name: put(value) for name, value in options.items()})
            for here, late in there.values():
                if here.flags.writeable:
                    here[...] = late.numpy()
                else:
                    assert here.tobytes() == late.numpy().tobytes(), "an array that is only read was changed"
            for here, late in there.values():
                if got is late:
                    return here
            if isinstance(got, tuple):
                return tuple(_back(item) for item in got)
            return _back(got)

        return run


def _back(value: Any) -> Any:
    return value.numpy() if isinstance(value, LateArray) else value
