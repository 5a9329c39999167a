"""Crossing: memory in which what a device sends and receives is while it is on the network, for two pieces in turn."""

from __future__ import annotations

from typing import Any

from commlib.devices.protocol import Device
from commlib.node.device_board import DeviceBoard


class Crossing:
    """See above. It is memory of the host, or of the device itself where messages take that (direct).

    A piece's memory is used again two pieces later: by then what was queued on it must be done.
    """

    def __init__(self, device: Device, *, direct: bool) -> None:
        self._device, self._direct = device, direct
        self._made: dict[tuple[int, str], list[Any]] = {}

    def block(self, piece: int, count: int, dtype: Any, part: str = "") -> Any:
        """Return memory for so many elements, 1-D. part: its name, where a piece needs more than one."""
        nbytes = count * dtype.itemsize
        made = self._made.setdefault((piece % 2, part), [])
        if not made or made[-1].nbytes < nbytes:
            # What was made before stays, as something queued may still use it: all of it is no more than this one.
            made.append(self._make(max(nbytes, 2 * made[-1].nbytes if made else 1)))
        return made[-1][:nbytes].view(dtype)

    def _make(self, nbytes: int) -> Any:
        if not self._direct:
            return self._device.staging(nbytes)
        return self._device.wrap(self._device.empty((nbytes,), "uint8"), "memory of a crossing")


def crossing_of(board: DeviceBoard, *, direct: bool) -> Crossing:
    """Return that of a board: one for all its calls, which run one after another."""
    found: Crossing | None = board.kept.get(Crossing)
    if found is None:
        found = board.kept[Crossing] = Crossing(board.device, direct=direct)
    return found
