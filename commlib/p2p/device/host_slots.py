"""Between: memory of the host that the devices of two ranks address, where they cannot address each other's.

See `devices.protocol.Exported` and `Opened`: it stands for these.
"""

from __future__ import annotations

import json

from commlib.buffers.peer_memory import Mapped, PeerMemory
from commlib.devices.protocol import Device
from commlib.errors import TransportError
from commlib.p2p.device.flags import HostMemory


class MadeBetween:
    """Made by one rank. Raises TransportError if there is not so much, or the device cannot address it."""

    def __init__(self, device: Device, nbytes: int, *, is_named: bool) -> None:
        self._made = PeerMemory(nbytes, is_named=is_named)
        memory = self._made.memory
        self.address, self.nbytes, self.handle = memory.address, nbytes, json.dumps(self._made.place)
        self._reached = device.reach(HostMemory(memory, [memory.address]))

    def free(self) -> None:
        self._reached.close()
        self._made.withdraw()


class FoundBetween:
    """Found by the other rank. Raises TransportError if that cannot be."""

    def __init__(self, device: Device, handle: str) -> None:
        try:
            memory = Mapped(tuple(json.loads(handle)))
        except OSError as error:
            raise TransportError(f"cannot map memory of the host for messages of another rank: {error}") from error
        self.address = memory.address
        self._reached = device.reach(HostMemory(memory, [memory.address]))

    def close(self) -> None:
        self._reached.close()
