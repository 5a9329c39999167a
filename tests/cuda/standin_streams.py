"""Threads, streams and events of the stand-in for CuPy: those of the late device."""

from __future__ import annotations

import itertools
import threading
import weakref
from typing import Any, ClassVar

from tests.late.engine import Engine
from tests.late.stream import LateEvent, LateStream

ENGINE = Engine(0.2e-3)

POISON = 0xFF  # NaN for floats
GPUS = 2

numbers = itertools.count(0x1000, 0x10)
"""Of whatever needs one that is not 0 or 1."""


class CUDARuntimeError(RuntimeError):
    pass


class Current(threading.local):
    """The device and streams that are current in a thread."""

    def __init__(self) -> None:
        self.device = 0
        self.streams: dict[int, Any] = {}


current = Current()


class Device:
    """cupy.cuda.Device."""

    def __init__(self, device: int | None = None) -> None:
        self.id = current.device if device is None else device
        if not 0 <= self.id < GPUS:
            raise CUDARuntimeError("cudaErrorInvalidDevice: invalid device ordinal")
        self._before: list[int] = []

    compute_capability = "90"

    def use(self) -> None:
        current.device = self.id

    def __enter__(self) -> Device:
        self._local().append(current.device)
        self.use()
        return self

    def __exit__(self, *args: object) -> None:
        current.device = self._local().pop()

    def _local(self) -> list[int]:  # one object may be entered by several threads
        entered: list[int] = current.__dict__.setdefault("entered", [])
        return entered


class Event:
    """cupy.cuda.Event."""

    def __init__(self, block: bool = False, disable_timing: bool = False, interprocess: bool = False) -> None:
        self.late: LateEvent | None = None

    def record(self, stream: Any = None) -> None:
        self.late = (get_current_stream() if stream is None else stream).late.record()

    @property
    def done(self) -> bool:
        return self.late is None or self.late.done()

    def synchronize(self) -> None:
        if self.late is not None:
            self.late.block()


class Stream:
    """cupy.cuda.Stream."""

    null: ClassVar[Stream]
    known: ClassVar[weakref.WeakValueDictionary[int, LateStream]] = weakref.WeakValueDictionary()

    def __init__(self, null: bool = False, non_blocking: bool = False, ptds: bool = False) -> None:
        self.late = LateStream()
        self.ptr = 0 if null else next(numbers)
        Stream.known[self.ptr] = self.late

    @classmethod
    def from_external(cls, obj: Any) -> Stream:
        """Return another object for the same stream."""
        version, ptr = obj.__cuda_stream__()
        assert version == 0 and ptr > 1, "the default stream is Stream.null"
        stream = cls.__new__(cls)
        stream.ptr, stream.late = ptr, cls.known[ptr]
        return stream

    def record(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        if event.late is not None:
            self.late.wait(event.late)

    def synchronize(self) -> None:
        self.late.record().block()

    def __enter__(self) -> Stream:
        current.__dict__.setdefault("before", []).append(get_current_stream())
        current.streams[current.device] = self
        return self

    def __exit__(self, *args: object) -> None:
        current.streams[current.device] = current.__dict__["before"].pop()


Stream.null = Stream(null=True)


def get_current_stream(device_id: int = -1) -> Any:
    return current.streams.get(current.device if device_id == -1 else device_id, Stream.null)
