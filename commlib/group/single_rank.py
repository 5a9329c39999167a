"""Alone: let a rank train by itself while others train together, for example outside their process set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from commlib.devices.host import HOST
from commlib.devices.protocol import Device
from commlib.dtypes import numpy_dtype


class Alone:
    """Stand for a communicator where a rank has no other to reduce with. Making it is not collective."""

    rank, size = 0, 1
    is_hierarchical = False

    def empty(self, shape: Any, dtype: Any = "float32", device: Device = HOST) -> Any:
        """Return a zeroed array."""
        if device is HOST:
            return np.zeros(shape, numpy_dtype(dtype))
        made = device.empty(shape, numpy_dtype(dtype))
        device.kernels.fill(device.wrap(made, "empty").reshape(-1), 0)
        return made

    def watch(self, text: str) -> Callable[[], None]:
        """Return what to call in a wait: nothing ends it."""
        return lambda: None

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Return what all ranks have."""
        return [obj]
