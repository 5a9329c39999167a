"""Staging of messages: send and fill device arrays directly, or through a copy in host memory.

Messages over lanes send a large array in pieces. A piece leaves while the next ones are copied to the host. The
receiver copies it to its device while the next ones arrive.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from commlib.devices.array import DeviceArray
from commlib.devices.copies import copy_to_host as fetched_from
from commlib.devices.waiting import wait_for
from commlib.dtypes import Array
from commlib.p2p.lanes.send_pieces import CopiedPiece

if TYPE_CHECKING:
    from commlib.group.waits import Waits


class StagedSend:
    """A host copy of a 1-D device array to send. pieces: with the event after each copy.

    Without pieces the copy and all earlier work of the current stream are complete.
    """

    def __init__(self, waits: Waits, array: DeviceArray, verb: str, piece: int) -> None:
        """piece: the bytes of each piece, 0 for a single copy."""
        self.pieces: list[CopiedPiece] = []
        if not 0 < piece < array.nbytes:
            self.memory = stage_to_host(waits, array, verb)
            return
        device, data, memory = array.device, array.view("uint8"), array.device.staging(array.nbytes)
        for start in range(0, array.nbytes, piece):
            stop = min(start + piece, array.nbytes)
            device.copy(memory[start:stop], data[start:stop])
            self.pieces.append(CopiedPiece(start, stop, device.current().record()))
        self.memory = memory.view(array.dtype)


class StagedReceive:
    """Host memory that receives a message for a 1-D device array.

    The array's stream copies it. Work that the caller queues after its wait is ordered after the copy.
    """

    def __init__(self, array: DeviceArray) -> None:
        self._memory = array.device.staging(array.nbytes)
        self.memory = self._memory.view(array.dtype)
        self._array, self._landed = array.view("uint8"), 0

    def land(self, start: int, stop: int) -> None:
        """Queue the copy of received bytes, in order. A repeated call for the same bytes is allowed."""
        with self._array.device.using(self._array.stream):
            self._array.device.copy(self._array[start:stop], self._memory[start:stop])
        self._landed = stop

    def end(self) -> None:
        """Queue the copy of the remaining bytes, after the whole message has arrived."""
        if self._landed < self._array.nbytes:
            self.land(self._landed, self._array.nbytes)


def await_device(waits: Waits, array: DeviceArray, verb: str) -> None:
    """Wait for the earlier work of the current stream, after which messages may read or write the array directly."""
    wait_for(array.device.current().record(), waits.watch(f"{verb}: work on {array.device.name}", ()))


def stage_to_host(waits: Waits, array: DeviceArray, what: str) -> Array:
    """Return a complete host copy of an array, in its shape."""
    return fetched_from(array, waits.watch(f"{what}: a copy from {array.device.name}", ()))
