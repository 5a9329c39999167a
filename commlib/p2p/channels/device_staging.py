"""Device staging: messages of device arrays that host messages carry, because the devices cannot reach each other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from commlib.devices.array import DeviceArray
from commlib.dtypes import Array
from commlib.errors import CommlibError, TransportError
from commlib.p2p.device.header import Header


class StagedMessage:
    """A host message with the data of a device array. Calling it returns the message once the copy is done.

    The constructor queues the copy on the current stream.
    """

    def __init__(self, array: DeviceArray, header: Header) -> None:
        self._device = array.device
        self._message: Array = array.device.staging(header.nbytes + array.nbytes)
        header.write(self._message)
        if array.nbytes:
            array.device.copy(self._message[header.nbytes :], array.reshape(-1).view("uint8"))
        self._copied = array.device.current().record()

    def __call__(self) -> Array | None:
        # The device must be current in this thread: see `DeviceEdge.is_over`.
        with convert_errors(), self._device.using(self._device.current()):
            return self._message if self._copied.done() else None


def copy_in(into: DeviceArray, payload: Array) -> None:
    """Queue a copy of a received payload to a device array."""
    if into.nbytes:
        block = into.device.staging(into.nbytes)
        block[:] = payload
        into.device.copy(into.reshape(-1).view("uint8"), block)


@contextmanager
def convert_errors() -> Iterator[None]:
    """Convert foreign errors of a device library to TransportError, for the thread that waits for the work."""
    try:
        yield
    except CommlibError:
        raise
    except Exception as error:
        raise TransportError(f"a device failed: {type(error).__name__}: {error}") from error
