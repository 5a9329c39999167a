"""Alone: let a rank train by itself while others train together, for example outside their process set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from commlib.dtypes import Array, numpy_dtype


class Alone:
    """Stand for a communicator where a rank has no other to reduce with. Making it is not collective."""

    rank, size = 0, 1
    is_hierarchical = False

    def empty(self, shape: Any, dtype: Any = "float32") -> Array:
        """Return a zeroed array."""
        return np.zeros(shape, numpy_dtype(dtype))

    def watch(self, text: str) -> Callable[[], None]:
        """Return what to call in a wait: nothing ends it."""
        return lambda: None

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Return what all ranks have."""
        return [obj]
