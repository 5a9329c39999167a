"""Device memory for results that the caller's stream uses, even if another stream computes them."""

from __future__ import annotations

from typing import Any

from commlib.devices.array import DeviceArray


def stream_alloc(x: DeviceArray, shape: tuple[int, ...], dtype: Any) -> DeviceArray:
    """Allocate memory on the stream from which `x` came; the current stream may write it.

    A device reuses memory in the order of the stream that allocated it. Memory of another stream could be reused while
    the caller's stream still reads it.
    """
    device, here = x.device, x.device.current()
    if x.stream is None or x.stream == here:
        return x.empty(shape, dtype)
    with device.using(x.stream):
        made = x.empty(shape, dtype)
    here.wait(x.stream.record())  # the previous user of this memory may still be using it
    return made
