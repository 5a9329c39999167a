"""The device seam: what commlib asks of memory that the host may not read at once, and of who works on it.

Work on a device is *queued*: a copy or a kernel goes to a stream, in whose order it runs later. Whatever is not on the
same stream waits for an event. As in CUDA, CuPy and PyTorch each thread has a *current* stream, to which copies and
kernels go; so no call here names its stream. The host is the device on which everything has happened when it returns.
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


class Event(Protocol):
    """Mark a place in a stream."""

    def done(self) -> bool:
        """Return whether everything queued before it has run. Never blocks."""
        ...


class Stream(Protocol):
    """A queue of a device: what is queued runs in its order."""

    def record(self, event: Any = None) -> Event:
        """Return the event behind everything queued so far. event: what it returned before, which is moved there."""
        ...

    def wait(self, event: Any) -> None:
        """Let what is queued from now on run after an event of the same device. Never blocks."""
        ...


class Buffer(Protocol):
    """Contiguous memory of a device. `stream` is that on which its contents come to be, or where they have been."""

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
    """Let the streams of a node's ranks meet: each tells the others of a number, and waits until they have told theirs.

    The words (uint32) in which they do are memory of the host that all ranks map. A number comes after another one if
    it is less than 2**31 ahead of it, modulo 2**32.
    """

    def meet(self, number: int) -> None:
        """Queue on the current stream: tell the others of a number, then wait until each has told that, or a later one.

        What follows is behind all that their streams did before.
        """
        ...

    def close(self) -> None:
        """Give the memory back. Nothing queued may still use it."""
        ...


class Exported(Protocol):
    """Memory of a device, uninitialised, that another process of the node can open. handle: a text that says where."""

    @property
    def address(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def handle(self) -> str: ...

    def free(self) -> None:
        """Give it back. Nobody may have it open, and nothing queued may use it. Idempotent."""
        ...


class Opened(Protocol):
    """Memory that another process exports, in this one."""

    @property
    def address(self) -> int: ...

    def close(self) -> None:
        """Let go of it. Nothing queued may use it. Idempotent."""
        ...


class OutOfReachError(TransportError):
    """Devices of a node's ranks cannot address each other's memory."""


class Device(Protocol):
    """Copy and compute on one kind of memory. One process uses one device of a kind at a time."""

    @property
    def name(self) -> str:
        """The kind, such as "cuda": the same on all ranks, which compare it."""
        ...

    @property
    def kernels(self) -> Kernels:
        """What computes there; each call is queued on the current stream."""
        ...

    def stream(self) -> Stream:
        """Make a stream."""
        ...

    def current(self) -> Stream:
        """Return the stream to which this thread's work goes."""
        ...

    def using(self, stream: Any) -> AbstractContextManager[Any]:
        """Make a stream the current one of this thread, for the length of a `with`."""
        ...

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Return a new array such as users have, uninitialised."""
        ...

    def at(self, address: int, shape: tuple[int, ...], dtype: Any, owner: Any) -> Any:
        """Return an array such as users have over memory that `owner` keeps."""
        ...

    def wrap(self, x: Any, verb: str, what: str = "x", *, written: bool = False) -> DeviceArray:
        """Return a user's array as commlib's, over the same memory; the current stream waits for its contents.

        Raises UsageError if it is not contiguous, has a dtype that commlib has not, or is read-only but `written`.
        """
        ...

    def copy(self, target: Any, source: Any) -> None:
        """Queue a copy of contiguous memory. One of them may be host memory from `staging`, untouched until then."""
        ...

    def repeatable(self, run: Callable[[], None]) -> Callable[[], None]:
        """Return what queues the same copies within the device and the same kernels as `run`, as often as it is called.

        On the stream that is current then. Nothing is queued now; `run` is called once, now or each time.
        """
        ...

    def staging(self, nbytes: int) -> Array:
        """Return host memory (uint8) that copies to and from the device are fast with."""
        ...

    def share(self, nbytes: int, rank: int, gather: Callable[[Any], list[Any]]) -> SharedMemory:
        """Return zeroed memory of the device that all ranks of a node can address. Collective.

        `gather` tells every rank's picklable value to all. Raises OutOfReachError on all ranks if that cannot be,
        TransportError if some rank has no memory left.
        """
        ...

    def reach(self, memory: SharedMemory) -> SharedMemory:
        """Let the device address memory of the host that ranks share, and return that, which keeps it.

        Raises TransportError if it cannot.
        """
        ...

    def export(self, nbytes: int) -> Exported:
        """Return new memory for one other rank of the node. Raises TransportError. Not collective."""
        ...

    def open(self, handle: str) -> Opened:
        """Open what another rank exports, by its handle. Raises TransportError if this device cannot reach it."""
        ...

    def signals(self, memory: SharedMemory, tell: Sequence[int], hear: Sequence[int]) -> Signals:
        """Return what meets by the words at addresses in a host's shared memory, which it keeps.

        tell: those that this rank writes; hear: those that it waits for. Raises TransportError if a stream cannot.
        """
        ...
