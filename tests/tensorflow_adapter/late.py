"""TensorFlow's CPU tensors as tensors of a device in host memory: TensorFlow computes at once, commlib late.

Code that forgets to wait for commlib passes NaN, or wrong numbers, to TensorFlow.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf

from commlib.buffers.aligned_arrays import aligned_empty
from commlib.devices.array import DeviceArray
from commlib_tensorflow import devices
from tests.late import LATE


class HostTensors:
    """See `commlib_tensorflow.devices.DeviceBackend`; also a place for tensors of tests. device: its name.

    core: the core's device.
    """

    device = "CPU"

    def __init__(self, core: Any) -> None:
        self.name: str = core.name
        self.taken: list[int] = []
        """Where results were that TensorFlow has taken."""
        self._core = core
        self.open()

    def open(self) -> None:
        """Treat CPU tensors as the device's again."""
        self._end = devices.register("CPU", self)

    def close(self) -> None:
        """Return CPU tensors to the host."""
        self._end()

    @contextmanager
    def host(self) -> Iterator[None]:
        """Treat CPU tensors as the host's within a `with`."""
        self.close()
        try:
            yield
        finally:
            self.open()

    def put(self, values: Any) -> tf.Tensor:
        return tf.constant(values)

    def device_of(self, tensor: Any, number: int) -> Any:
        return self._core

    def capsule(self, array: DeviceArray) -> Any:
        self.taken.append(array.address)
        kind: Any = type("Lent", (ctypes.c_uint8 * array.nbytes,), {"owner": None})
        lent = kind.from_address(array.address)
        lent.owner = array.owner
        given = np.frombuffer(lent, array.dtype).reshape(array.shape)
        if array.address % 64:  # TensorFlow would abort the process
            given = aligned_empty(array.shape, array.dtype)
            given[...] = np.frombuffer(lent, array.dtype).reshape(array.shape)
        return given.__dlpack__()


def late() -> HostTensors:
    """Put CPU tensors on the late device."""
    return HostTensors(LATE)


def watched(*, alone: bool = False) -> Iterator[HostTensors]:
    """Put tensors there for one test, and check that all data took that path in order. alone: one rank may be idle."""
    place, races, queued = late(), LATE.races, LATE.queued
    yield place
    place.close()
    assert LATE.races == races
    assert (place.taken and LATE.queued > queued) or alone
