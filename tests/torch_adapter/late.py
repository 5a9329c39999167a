"""Torch's CPU tensors as tensors of a device in host memory: torch computes at once, commlib's work is late.

Code that forgets to wait for commlib reads poison, mostly NaN. The host itself acts as torch's stream.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from commlib.devices.array import DeviceArray
from commlib_torch import devices
from tests.late import LATE


class _Event:
    """An event that has already completed."""

    def done(self) -> bool:
        return True

    def block(self) -> None:
        pass


class _AtOnce:
    """A stream's queue that runs its work immediately."""

    def put(self, work: Callable[[], Any]) -> None:
        work()


class HostStream:
    """See `devices.protocol.Stream`."""

    queue = _AtOnce()

    def record(self, event: Any = None) -> _Event:
        return _Event()

    def wait(self, event: Any) -> None:
        event.block()


class HostTensors:
    """See `commlib_torch.devices.DeviceBackend` and `place.Place`. is_there: CPU tensors are on the device.

    core: the core's device. stream: a stream of it that runs its work immediately.
    """

    device = "cpu"

    def __init__(self, core: Any, stream: Any) -> None:
        self.name: str = core.name
        self.is_there: Callable[[Tensor], bool] = lambda tensor: True
        self._core, self._stream = core, stream
        self._end = devices.register("cpu", self)

    def close(self) -> None:
        """Return CPU tensors to the host."""
        self._end()

    # A place

    def put(self, values: Tensor) -> Tensor:
        return values.clone()

    @contextmanager
    def host(self) -> Iterator[None]:
        self._end()
        try:
            yield
        finally:
            self._end = devices.register("cpu", self)

    # A kind

    def device_of(self, tensor: Tensor) -> Any:
        return self._core if self.is_there(tensor) else None

    def used(self) -> Any:
        return self._core

    def stream(self, device: Any) -> Any:
        return self._stream

    def lend(self, array: DeviceArray) -> Any:
        kind: Any = type("Lent", (ctypes.c_uint8 * array.nbytes,), {"owner": None})
        lent = kind.from_address(array.address)
        lent.owner = array.owner
        return lent

    def tensor(self, lent: Any) -> Tensor:
        return torch.frombuffer(lent, dtype=torch.uint8)


def late() -> HostTensors:
    """Put CPU tensors on the late device."""
    return HostTensors(LATE, HostStream())
