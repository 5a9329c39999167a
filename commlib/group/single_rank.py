"""SingleRank: a communicator of one rank, for ranks that train by themselves, for example outside their process set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from commlib.devices.host import HOST
from commlib.devices.protocol import Device
from commlib.dtypes import numpy_dtype


class SingleRank:
    """Communicator of one rank, which has no other rank to reduce with. Its construction is not collective."""

    rank, size = 0, 1
    is_hierarchical = False

    def empty(self, shape: Any, dtype: Any = "float32", device: Device = HOST) -> Any:
        """Return an array of zeros."""
        if device is HOST:
            return np.zeros(shape, numpy_dtype(dtype))
        array = device.empty(shape, numpy_dtype(dtype))
        device.kernels.fill(device.wrap(array, "empty").reshape(-1), 0)
        return array

    def watch(self, text: str) -> Callable[[], None]:
        """Return a callback for use during a wait. It never interrupts the wait."""
        return lambda: None

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Return the object of every rank: a list with this rank's object only."""
        return [obj]
