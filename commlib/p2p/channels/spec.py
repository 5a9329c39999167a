"""Channel spec: the arguments of a channel that must be the same on both sides."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from commlib.dtypes import name_of
from commlib.p2p.channels.payload import Shape


@dataclass(frozen=True, slots=True)
class ChannelSpec:
    """The arguments of a channel that must be the same on both sides."""

    shape: Shape
    dtype: np.dtype[Any]
    depth: int
    codec: str
    device: str = ""
    """The kind of device of the arrays; "" for the host."""

    @property
    def nbytes(self) -> int:
        """Bytes of an array of `shape`."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        text = f"{name_of(self.dtype)}, shape {self.shape}, depth {self.depth}, codec {self.codec}"
        return f"{text}, device {self.device}" if self.device else text
