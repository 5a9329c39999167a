"""The host as a device: arrays are numpy's, and every operation completes immediately."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cached_property
from typing import Any

import numpy as np

from commlib.buffers import shared_memory
from commlib.buffers.views import address_of, as_host, contiguous, writable
from commlib.devices.protocol import ExportedMemory, OpenedMemory, Signals
from commlib.dtypes import Array
from commlib.errors import TransportError
from commlib.kernels.protocol import Kernels
from commlib.protocols import SharedMemory


class _HostStream:
    """The host's only stream, which is also its only event: everything is complete."""

    def record(self, event: Any = None) -> _HostStream:
        return self

    def wait(self, event: Any) -> None:
        pass

    def done(self) -> bool:
        return True


_IN_ORDER = _HostStream()


class HostDevice:
    """The host as a `protocol.Device`."""

    name = "host"

    @cached_property
    def kernels(self) -> Kernels:
        from commlib.kernels.host.table import HostKernels  # loads all codecs' kernels, so only on first use

        return HostKernels()

    def stream(self) -> _HostStream:
        return _IN_ORDER

    def current(self) -> _HostStream:
        return _IN_ORDER

    def using(self, stream: Any) -> nullcontext[None]:
        return nullcontext()

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        return np.empty(shape, dtype)

    def at(self, address: int, shape: tuple[int, ...], dtype: Any, owner: Any) -> Array:
        assert isinstance(owner, np.ndarray) and address_of(owner) == address
        return owner.view(dtype).reshape(shape)  # type: ignore[no-any-return]

    def wrap(self, x: Any, verb: str, what: str = "x", *, written: bool = False) -> Any:
        array = as_host(x, verb, what)
        return contiguous(writable(array, verb, what) if written else array, verb)

    def copy(self, target: Any, source: Any) -> None:
        target[...] = source

    def repeatable(self, run: Callable[[], None]) -> Callable[[], None]:
        return run

    def staging(self, nbytes: int) -> Array:
        return np.empty(nbytes, np.uint8)

    def share(self, nbytes: int, rank: int, gather: Callable[[Any], list[Any]]) -> SharedMemory:
        return shared_memory.share(rank, nbytes, gather)

    def export(self, nbytes: int) -> ExportedMemory:
        raise TransportError("host memory is shared by files: see buffers.peer_memory")

    def open(self, handle: str) -> OpenedMemory:
        raise TransportError("host memory is shared by files: see buffers.peer_memory")

    def reach(self, memory: SharedMemory) -> SharedMemory:
        return memory

    def signals(self, memory: SharedMemory, written: Sequence[int], awaited: Sequence[int]) -> Signals:
        raise TransportError("the host has no streams: its ranks synchronize on a board")


HOST = HostDevice()
