"""Send and fill a device's array: from and into its own memory, or through a copy on the host.

Where messages go by lanes, a large array is copied in pieces: each leaves while the next ones are still being copied,
and is copied to the other device, if there is one, while the next ones come.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from commlib.devices.array import DeviceArray
from commlib.devices.copies import fetched as fetched_from
from commlib.devices.waiting import wait_for
from commlib.dtypes import Array
from commlib.p2p.lanes.send_pieces import Copied

if TYPE_CHECKING:
    from commlib.group.group import Group


class Outgoing:
    """Memory of the host from which a 1-D array of a device is sent. pieces: when they are there, each as it is copied.

    Without pieces all of it is there. What the current stream was told before is done by then.
    """

    def __init__(self, comm: Group, array: DeviceArray, verb: str, piece: int) -> None:
        """piece: bytes of each, 0 for the whole at once."""
        self.pieces: list[Copied] = []
        if not 0 < piece < array.nbytes:
            self.memory = fetched(comm, array, verb)
            return
        device, data, memory = array.device, array.view("uint8"), array.device.staging(array.nbytes)
        for start in range(0, array.nbytes, piece):
            stop = min(start + piece, array.nbytes)
            device.copy(memory[start:stop], data[start:stop])
            self.pieces.append(Copied(start, stop, device.current().record()))
        self.memory = memory.view(array.dtype)


class Incoming:
    """Memory of the host in which a message for a 1-D array of a device arrives.

    It is copied on the array's stream, which is in order with what its thread queues after it has waited.
    """

    def __init__(self, array: DeviceArray) -> None:
        self._memory = array.device.staging(array.nbytes)
        self.memory = self._memory.view(array.dtype)
        self._array, self._landed = array.view("uint8"), 0

    def land(self, start: int, stop: int) -> None:
        """Copy bytes that have come. In their order; the same ones may be told of twice."""
        with self._array.device.using(self._array.stream):
            self._array.device.copy(self._array[start:stop], self._memory[start:stop])
        self._landed = stop

    def end(self) -> None:
        """Copy what is left, now that all has come."""
        if self._landed < self._array.nbytes:
            self.land(self._landed, self._array.nbytes)


def await_device(comm: Group, array: DeviceArray, verb: str) -> None:
    """Wait for what the current stream was told before, so that messages may read or fill the array itself."""
    wait_for(array.device.current().record(), comm.watch(f"{verb}: work on {array.device.name}", ()))


def fetched(comm: Group, array: DeviceArray, what: str) -> Array:
    """Return host memory with the values of an array, which are there, in its shape."""
    return fetched_from(array, comm.watch(f"{what}: a copy from {array.device.name}", ()))
