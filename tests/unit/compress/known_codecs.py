"""Codecs for tests of their users: one loses nothing, and one loses a known amount."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from commlib.dtypes import Array


@dataclass(frozen=True, slots=True)
class Exact:
    """float32 unchanged; with a `length` that varies with the values, without zeros at the end."""

    align: int = 1
    feedback: bool = False
    fixed: bool = True

    @property
    def name(self) -> str:
        return "exact"

    def payload_bytes(self, count: int) -> int:
        return 4 * count

    def encode(self, x: Array, payload: Array, *, seed: int = 0, residual: tuple[Array, Array] | None = None) -> int:
        value = x if residual is None else x + residual[0]
        if residual is not None:
            residual[1][...] = 0
        payload[: 4 * len(x)] = value.view(np.uint8)
        return 4 * len(x)

    def decode(self, payload: Array, out: Array, *, add: bool = False) -> None:
        value = np.frombuffer(payload[: 4 * len(out)].tobytes(), np.float32)
        out[...] = out + value if add else value


@dataclass(frozen=True, slots=True)
class Whole:
    """The next integer below, as int16: sending 0.75 four times without feedback sends nothing."""

    align: int = 4
    feedback: bool = True
    fixed: bool = True

    @property
    def name(self) -> str:
        return "whole"

    def payload_bytes(self, count: int) -> int:
        return 2 * count

    def encode(self, x: Array, payload: Array, *, seed: int = 0, residual: tuple[Array, Array] | None = None) -> int:
        value = x if residual is None else x + residual[0]
        whole = np.floor(value).astype(np.int16)
        if residual is not None:
            residual[1][...] = value - whole
        payload[: 2 * len(x)] = whole.view(np.uint8)
        return 2 * len(x)

    def decode(self, payload: Array, out: Array, *, add: bool = False) -> None:
        value = np.frombuffer(payload[: 2 * len(out)].tobytes(), np.int16).astype(np.float32)
        out[...] = out + value if add else value
