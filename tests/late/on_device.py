"""Calls with arrays of the late device, for test bodies that are written for numpy."""

from __future__ import annotations

from typing import Any

import numpy as np

from commlib.dtypes import Array
from tests.late.device import LATE


class OnDevice:
    """A Communicator, or Twins of one, called with arrays of a device: for test bodies that are written for numpy.

    Arguments are copied to the device, and back once the call has run; results are copied back. device: LATE, or
    another one with `put`, `fetch`, and `kind`, the type of its arrays.
    """

    def __init__(self, comm: Any, device: Any = LATE) -> None:
        self.rank, self.size, self._comm, self._device = comm.rank, comm.size, comm, device

    def __getattr__(self, verb: str) -> Any:
        method, device = getattr(self._comm, verb), self._device

        def run(*args: Any, **options: Any) -> Any:
            copies: dict[int, tuple[Array, Any]] = {}

            def put(value: Any) -> Any:
                if not isinstance(value, np.ndarray):
                    return value
                if id(value) not in copies:
                    copies[id(value)] = value, device.put(value)
                return copies[id(value)][1]

            result = method(*map(put, args), **{name: put(value) for name, value in options.items()})
            for host_array, device_array in copies.values():
                if host_array.flags.writeable:
                    host_array[...] = device.fetch(device_array)
                else:
                    assert host_array.tobytes() == device.fetch(device_array).tobytes(), (
                        "an array that is only read was changed"
                    )

            def back(value: Any) -> Any:
                same = [host_array for host_array, device_array in copies.values() if value is device_array]
                return same[0] if same else device.fetch(value) if isinstance(value, device.kind) else value

            return tuple(map(back, result)) if isinstance(result, tuple) else back(result)

        return run
