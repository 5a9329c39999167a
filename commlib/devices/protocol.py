"""The device protocol: the operations that commlib needs from a kind of memory and its processors.

Work on a device is *queued*: a copy or a kernel goes to a stream and runs later, in the order of the stream. Work on
another stream must wait for an event. As in CUDA, CuPy and PyTorch, each thread has a *current* stream for its copies
and kernels, so no call here names its stream. On the host device all work is complete when the call returns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from commlib.devices.array import DeviceArray
from commlib.dtypes import Array
from commlib.errors import TransportError
from commlib.kernels.protocol import Kernels
from commlib.protocols import SharedMemory


class DeviceEvent(Protocol):
    """A position in a stream."""

    def done(self) -> bool:
        """Return whether all work queued before it is complete. Never blocks."""
        ...


class Stream(Protocol):
    """A work queue of a device. Queued work runs in order."""

    def record(self, event: Any = None) -> DeviceEvent:
        """Return an event after all work queued so far. event: an earlier event to record again, for no new one."""
        ...

    def wait(self, event: Any) -> None:
        """Make work queued from now on run after an event of the same device. Never blocks."""
        ...


class Buffer(Protocol):
    """Contiguous memory of a device. stream: the stream that writes its contents."""

    @property
    def address(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def dtype(self) -> Any: ...

    @property
    def device(self) -> Any: ...

    @property
    def stream(self) -> Any: ...


class Signals(Protocol):
    """Synchronize the streams of a node's ranks: each writes a number for the others, and waits for their numbers.

    The flags (uint32) are in host memory that all ranks map. A number is later than another one if it is less than
    2**31 ahead of it, modulo 2**32.
    """

    def queue(self, number: int) -> None:
        """Queue on the current stream: write a number for the others, then wait for the same or a later one of each.

        Later work on this stream runs after all work that their streams had queued before.
        """
        ...

    def close(self) -> None:
        """Free the memory. No queued work may still use it."""
        ...


class ExportedMemory(Protocol):
    """Uninitialised device memory that another process of the node can open. handle: a text that identifies it."""

    @property
    def address(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def handle(self) -> str: ...

    def free(self) -> None:
        """Free the memory. No process may have it open, and no queued work may use it. Idempotent."""
        ...


class OpenedMemory(Protocol):
    """A mapping, in this process, of memory that another process exports."""

    @property
    def address(self) -> int: ...

    def close(self) -> None:
        """Unmap the memory. No queued work may use it. Idempotent."""
        ...


class UnreachableMemoryError(TransportError):
    """The devices of a node's ranks cannot address each other's memory."""


class Device(Protocol):
    """A device: copies and kernels on one kind of memory. A process uses one device of each kind."""

    @property
    def name(self) -> str:
        """The kind of device, such as "cuda". Ranks compare it, so it must be the same on all."""
        ...

    @property
    def kernels(self) -> Kernels:
        """The kernels of the device; each call is queued on the current stream."""
        ...

    def stream(self) -> Stream:
        """Return a new stream."""
        ...

    def current(self) -> Stream:
        """Return the current stream of this thread."""
        ...

    def using(self, stream: Any) -> AbstractContextManager[Any]:
        """Make a stream current in this thread, within a `with`."""
        ...

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Return a new, uninitialised array of the user's array type."""
        ...

    def at(self, address: int, shape: tuple[int, ...], dtype: Any, owner: Any) -> Any:
        """Return an array of the user's array type over memory that `owner` keeps alive."""
        ...

    def wrap(self, x: Any, verb: str, what: str = "x", *, written: bool = False) -> DeviceArray:
        """Return a DeviceArray over a user's array; the current stream waits for its contents.

        Raises UsageError if the array is not contiguous, has an unsupported dtype, or is read-only but `written`.
        """
        ...

    def copy(self, target: Any, source: Any) -> None:
        """Queue a copy of contiguous memory. One side may be memory from `staging`; do not touch it until then."""
        ...

    def repeatable(self, run: Callable[[], None]) -> Callable[[], None]:
        """Return a function that queues the same device copies and kernels as `run` each time it is called.

        They go to the stream that is current at that call. This method queues nothing. `run` is called either once,
        now, or in each call of the function.
        """
        ...

    def staging(self, nbytes: int) -> Array:
        """Return host memory (uint8) for fast copies to and from the device, such as pinned memory."""
        ...

    def share(self, nbytes: int, rank: int, gather: Callable[[Any], list[Any]]) -> SharedMemory:
        """Return zeroed device memory that all ranks of a node can address. Collective.

        gather: all-gathers picklable values. On all ranks, raises OutOfReachError if some device cannot address
        another's memory, TransportError if some rank has not enough memory.
        """
        ...

    def reach(self, memory: SharedMemory) -> SharedMemory:
        """Map shared host memory for the device; return the mapping, which owns the memory.

        Raises TransportError if the device cannot address it.
        """
        ...

    def export(self, nbytes: int) -> ExportedMemory:
        """Return new memory that one other rank of the node can open. Raises TransportError. Not collective."""
        ...

    def open(self, handle: str) -> OpenedMemory:
        """Open the memory of a handle from `export`. Raises TransportError if this device cannot address it."""
        ...

    def signals(self, memory: SharedMemory, written: Sequence[int], awaited: Sequence[int]) -> Signals:
        """Return signals over flags in shared host memory, which they keep alive.

        written: addresses that this rank writes; awaited: addresses that it waits for. Raises TransportError if the
        device's streams do not support this.
        """
        ...
