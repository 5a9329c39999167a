"""Launch replay: repeated calls on the same arrays reuse the prepared launch."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from commlib.devices.protocol import Device

# The most prepared launches to keep: a call needs one or two for each set of arrays that it is used with.
_MOST = 64


class LaunchReplay:
    """The prepared launches of a device, by key. They hold addresses, not user arrays."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._known: dict[Hashable, Callable[[], None]] = {}

    def queue(self, key: Hashable, run: Callable[[], None]) -> None:
        """Queue the work of `run` on the current stream. key: all values the work depends on, mainly addresses."""
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= _MOST:
                self._known.clear()
            known = self._known[key] = self._device.repeatable(run)
        known()


def queue_once(key: Hashable, run: Callable[[], None]) -> None:
    """Queue work that is not repeated."""
    run()
