"""Beside: run exchanges on a stream of their own, so that they go on while the caller's stream computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from commlib.devices.protocol import Device


class Beside:
    """See above. One for all exchanges of an axis: they are queued in the order in which they are started.

    Each is behind all that the caller's stream was told before.
    """

    def __init__(self, device: Device) -> None:
        self._device, self._stream = device, device.stream()

    def start(self, run: Callable[[], Any], *given: Any) -> Started:
        """Queue what `run` asks of the device. given: arrays that it uses."""
        self._stream.wait(self._device.current().record())
        with self._device.using(self._stream):
            value = run()
            return Started(self._device, value, self._stream.record(), given)


class Started:
    """Work that is under way. It keeps what it was given: memory of the caller's stream, which may still be read."""

    def __init__(self, device: Device, value: Any, event: Any, given: tuple[Any, ...]) -> None:
        self._device, self._event, self._given = device, event, given
        self.value = value
        """What it returned, whose contents may still have to come."""

    def wait(self) -> Any:
        """Let the caller's stream wait for it, and return its value."""
        self._device.current().wait(self._event)
        self._given = ()
        return self.value
