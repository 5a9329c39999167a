"""CudaStream and CudaEvent: CuPy's streams and events behind the device protocol."""

from __future__ import annotations

from typing import Any


class CudaEvent:
    """A CUDA event as `devices.protocol.Event`."""

    __slots__ = ("raw",)

    def __init__(self, raw: Any) -> None:
        self.raw = raw

    def done(self) -> bool:
        return bool(self.raw.done)


class CudaStream:
    """A CUDA stream as `devices.protocol.Stream`. Two objects are equal if they are the same stream.

    gpu: a cupy.cuda.Device. `record` and `wait` make it current, because another GPU may be current in the calling
    thread, and both new events and the default stream belong to the current GPU.
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
            result = CudaEvent(self._new_event()) if event is None else event
            result.raw.record(self.raw)
        return result

    def wait(self, event: Any) -> None:
        with self._gpu:
            self.raw.wait_event(event.raw)
