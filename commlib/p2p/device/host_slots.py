"""Host slots: slots in shared host memory, for devices that cannot address each other's memory.

They implement `devices.protocol.Exported` and `Opened`.
"""

from __future__ import annotations

import json

from commlib.buffers.peer_memory import PeerMapping, PeerMemory
from commlib.devices.protocol import Device
from commlib.errors import TransportError
from commlib.p2p.device.flags import HostMemory


class HostSlotOwner:
    """The sender's host slots. Raises TransportError if there is no memory, or the device cannot address it."""

    def __init__(self, device: Device, nbytes: int, *, is_named: bool) -> None:
        self._peer_memory = PeerMemory(nbytes, is_named=is_named)
        memory = self._peer_memory.memory
        self.address, self.nbytes, self.handle = memory.address, nbytes, json.dumps(self._peer_memory.place)
        self._reached = device.reach(HostMemory(memory, [memory.address]))

    def free(self) -> None:
        self._reached.close()
        self._peer_memory.withdraw()


class HostSlotMapping:
    """The receiver's mapping of the sender's host slots. Raises TransportError if it cannot map or address them."""

    def __init__(self, device: Device, handle: str) -> None:
        try:
            memory = PeerMapping(tuple(json.loads(handle)))
        except OSError as error:
            raise TransportError(f"cannot map the host memory with messages of another rank: {error}") from error
        self.address = memory.address
        self._reached = device.reach(HostMemory(memory, [memory.address]))

    def close(self) -> None:
        self._reached.close()
