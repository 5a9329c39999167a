"""Repeats: queue the same copies and kernels again and again, each time with less ado than the first."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from commlib.devices.protocol import Device

# How many are remembered: of a call, one or two for each arrays that it is made on in turn.
_MOST = 64


class Repeats:
    """See above. What is remembered holds no user's array, only addresses."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._known: dict[Hashable, Callable[[], None]] = {}

    def queue(self, key: Hashable, run: Callable[[], None]) -> None:
        """Queue what `run` does on the current stream. key: what that depends on, addresses above all."""
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= _MOST:
                self._known.clear()
            known = self._known[key] = self._device.repeatable(run)
        known()


def once(key: Hashable, run: Callable[[], None]) -> None:
    """Queue what is not done again."""
    run()
