"""CudaStream and CudaEvent: streams and events of CuPy as the seam asks for them."""

from __future__ import annotations

from typing import Any


class CudaEvent:
    """See `devices.protocol.Event`."""

    __slots__ = ("raw",)

    def __init__(self, raw: Any) -> None:
        self.raw = raw

    def done(self) -> bool:
        return bool(self.raw.done)


class CudaStream:
    """See `devices.protocol.Stream`. Two are equal if they are the same stream.

    gpu: a cupy.cuda.Device. Another one may be current in a thread that records or waits, where events are made, too,
    and a default stream is that of the current one.
    """

    __slots__ = ("_gpu", "_new_event", "raw")

    def __init__(self, raw: Any, gpu: Any, new_event: Any) -> None:
        self.raw, self._gpu, self._new_event = raw, gpu, new_event

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CudaStream) and self.raw.ptr == other.raw.ptr

    def __hash__(self) -> int:
        return hash(self.raw.ptr)

    def record(self, event: Any = None) -> CudaEvent:
        with self._gpu:
            found = CudaEvent(self._new_event()) if event is None else event
            found.raw.record(self.raw)
        return found

    def wait(self, event: Any) -> None:
        with self._gpu:
            self.raw.wait_event(event.raw)
