"""Side stream: run dispatches and combines on a separate stream, concurrently with the caller's stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from commlib.devices.protocol import Device


class SideStream:
    """A stream for all dispatches and combines of an axis. They are queued in the order of their `start` calls.

    Each one runs after all work queued on the caller's stream before `start`.
    """

    def __init__(self, device: Device) -> None:
        self._device, self._stream = device, device.stream()

    def start(self, run: Callable[[], Any], *given: Any) -> SideWork:
        """Queue the device work of `run` on the side stream. given: arrays that it uses."""
        self._stream.wait(self._device.current().record())
        with self._device.using(self._stream):
            value = run()
            return SideWork(self._device, value, self._stream.record(), given)


class SideWork:
    """Work running on the side stream. Keeps its input arrays alive: their memory belongs to the caller's stream."""

    def __init__(self, device: Device, value: Any, event: Any, given: tuple[Any, ...]) -> None:
        self._device, self._event, self._given = device, event, given
        self.value = value
        """The return value of `run`. Its contents may not be computed yet."""

    def wait(self) -> Any:
        """Make the caller's stream wait for the work, and return its value."""
        self._device.current().wait(self._event)
        self._given = ()
        return self.value
