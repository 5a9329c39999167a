"""Calls with arrays of the late device, for test bodies that know numpy's only."""

from __future__ import annotations

from typing import Any

import numpy as np

from commlib.dtypes import Array
from tests.late.device import LATE


class OnDevice:
    """A Communicator, or Twins of one, called with arrays of a device: for test bodies that know numpy's only.

    Arguments are copied there, and back from there once the call has run; results are copied back. device: LATE, or
    another one with `put`, `fetch`, and `kind`, the type of its arrays.
    """

    def __init__(self, comm: Any, device: Any = LATE) -> None:
        self.rank, self.size, self._comm, self._device = comm.rank, comm.size, comm, device

    def __getattr__(self, verb: str) -> Any:
        method, device = getattr(self._comm, verb), self._device

        def run(*args: Any, **options: Any) -> Any:
            there: dict[int, tuple[Array, Any]] = {}

            def put(value: Any) -> Any:
                if not isinstance(value, np.ndarray):
                    return value
                if id(value) not in there:
                    there[id(value)] = value, device.put(value)
                return there[id(value)][1]

            got = method(*map(put, args), **{name: put(value) for name, value in options.items()})
            for here, late in there.values():
                if here.flags.writeable:
                    here[...] = device.fetch(late)
                else:
                    assert here.tobytes() == device.fetch(late).tobytes(), "an array that is only read was changed"

            def back(value: Any) -> Any:
                same = [here for here, late in there.values() if value is late]
                return same[0] if same else device.fetch(value) if isinstance(value, device.kind) else value

            return tuple(map(back, got)) if isinstance(got, tuple) else back(got)

        return run
