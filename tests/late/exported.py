"""Memory of the late device that another process opens: the host's shared memory, poison at first."""

from __future__ import annotations

import json
from collections.abc import Callable

from commlib.buffers.peer_memory import PeerMapping, PeerMemory
from commlib.errors import TransportError


class LateExported:
    """See `devices.protocol.Exported`."""

    def __init__(self, nbytes: int) -> None:
        memory = PeerMemory(max(nbytes, 1), is_named=False)
        self.nbytes, self.address, self.handle = nbytes, memory.memory.address, json.dumps(memory.place)
        memory.memory.array(0, nbytes).fill(0xFF)
        self.mappings = [memory.memory]
        self._withdraw: Callable[[], None] = memory.withdraw

    def free(self) -> None:
        self._withdraw()
        self.mappings.clear()  # unmapped once no queued work uses it


class LateOpened:
    """See `devices.protocol.Opened`."""

    def __init__(self, handle: str) -> None:
        path, name, nbytes = json.loads(handle)
        try:
            memory = PeerMapping((path, name, nbytes))
        except OSError as error:
            raise TransportError(f"cannot open late memory of another rank: {error}") from error
        self.address, self.nbytes = memory.address, nbytes
        self.mappings = [memory]

    def close(self) -> None:
        self.mappings.clear()
