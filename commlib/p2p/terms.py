"""Terms: name what both sides of a channel must have alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from commlib.dtypes import name_of
from commlib.p2p.form import Shape


@dataclass(frozen=True, slots=True)
class Terms:
    """Hold what both sides of a channel must have alike."""

    shape: Shape
    dtype: np.dtype[Any]
    depth: int
    codec: str

    def __str__(self) -> str:
        return f"{name_of(self.dtype)}, shape {self.shape}, depth {self.depth}, codec {self.codec}"
