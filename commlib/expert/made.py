"""Made: memory of a device for results that the caller's stream uses, wherever they are computed."""

from __future__ import annotations

from typing import Any

from commlib.devices.array import DeviceArray


def made_for(x: DeviceArray, shape: tuple[int, ...], dtype: Any) -> DeviceArray:
    """Return new memory of the stream from which `x` came; the current stream may write it.

    A device uses memory again in the order of the stream that it was made on: of another one it would be used again
    while the caller's still reads it.
    """
    device, here = x.device, x.device.current()
    if x.stream is None or x.stream == here:
        return x.empty(shape, dtype)
    with device.using(x.stream):
        made = x.empty(shape, dtype)
    here.wait(x.stream.record())  # who had this memory before may still use it
    return made
