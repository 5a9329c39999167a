"""Network memory: buffers for sending and receiving a device's data, double-buffered over the pieces of a call."""

from __future__ import annotations

from typing import Any

from commlib.devices.protocol import Device
from commlib.node.device_board import DeviceBoard


class NetworkMemory:
    """Two sets of buffers: in host memory, or in device memory if the transport accepts that (`direct`).

    Piece n+2 reuses the buffers of piece n, so the work that piece n queued on them must be done by then.
    """

    def __init__(self, device: Device, *, direct: bool) -> None:
        self._device, self._direct = device, direct
        self._made: dict[tuple[int, str], list[Any]] = {}

    def block(self, piece: int, count: int, dtype: Any, part: str = "") -> Any:
        """Return a 1-D buffer of `count` elements. part: its name, for pieces that need several buffers."""
        nbytes = count * dtype.itemsize
        blocks = self._made.setdefault((piece % 2, part), [])
        if not blocks or blocks[-1].nbytes < nbytes:
            # Keep the smaller buffers: queued work may still use them. Together they are no larger than the new one.
            blocks.append(self._make(max(nbytes, 2 * blocks[-1].nbytes if blocks else 1)))
        return blocks[-1][:nbytes].view(dtype)

    def _make(self, nbytes: int) -> Any:
        if not self._direct:
            return self._device.staging(nbytes)
        return self._device.wrap(self._device.empty((nbytes,), "uint8"), "memory of a crossing")


def network_memory_of(board: DeviceBoard, *, direct: bool) -> NetworkMemory:
    """Return the network memory of a board. All its calls share it, because they run one after another."""
    memory: NetworkMemory | None = board.cached.get(NetworkMemory)
    if memory is None:
        memory = board.cached[NetworkMemory] = NetworkMemory(board.device, direct=direct)
    return memory
