"""Payload format: write an array into a channel's message, plain or encoded by a codec, as both sides specify it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from commlib.dtypes import FLOATS, Array, name_of
from commlib.errors import UsageError

Shape = tuple[int, ...]


class ChannelCodec(Protocol):
    """The part of `compress.codec.ChannelCodec` that channels use."""

    @property
    def name(self) -> str: ...

    @property
    def fixed(self) -> bool: ...

    def payload_bytes(self, count: int) -> int: ...

    def encode(self, x: Array, payload: Array, *, seed: int = 0) -> int: ...

    def decode(self, payload: Array, out: Array) -> None: ...


class PayloadFormat(Protocol):
    """Convert arrays of one dtype to payloads (uint8, 1-D) and back."""

    name: str
    is_plain: bool
    """Whether the payload is the array's own bytes."""

    def nbytes(self, shape: Shape) -> int:
        """Return the length of the payload of an array of this shape."""
        ...

    def view(self, payload: Array, shape: Shape) -> Array:
        """Return the array for a payload in this memory: a view, or a new array to decode into."""
        ...

    def write(self, x: Array, payload: Array, seed: int) -> None:
        """Write a contiguous array of the dtype to a payload."""
        ...

    def read(self, payload: Array, view: Array) -> None:
        """Decode a received payload into its `view`."""
        ...


class PlainFormat:
    """The plain format: the array's bytes are the payload."""

    name, is_plain = "none", True

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self._dtype = dtype

    def nbytes(self, shape: Shape) -> int:
        return math.prod(shape) * self._dtype.itemsize

    def view(self, payload: Array, shape: Shape) -> Array:
        return payload[: self.nbytes(shape)].view(self._dtype).reshape(shape)

    def write(self, x: Array, payload: Array, seed: int) -> None:
        source = x.reshape(-1).view(np.uint8)
        payload[: len(source)] = source

    def read(self, payload: Array, view: Array) -> None:
        pass


class CodedFormat:
    """The format of floating-point arrays encoded by a codec with payloads of fixed length."""

    is_plain = False

    def __init__(self, codec: ChannelCodec, dtype: np.dtype[Any]) -> None:
        if not codec.fixed:
            raise UsageError(
                f"channel: codec {codec.name} has payloads of variable length: use a codec with a fixed payload length"
            )
        if name_of(dtype) not in FLOATS:
            raise UsageError(f"channel: codecs take {', '.join(FLOATS)}, got {name_of(dtype)}")
        self.name, self._codec, self._dtype = codec.name, codec, dtype

    def nbytes(self, shape: Shape) -> int:
        return self._codec.payload_bytes(math.prod(shape))

    def view(self, payload: Array, shape: Shape) -> Array:
        return np.empty(shape, self._dtype)

    def write(self, x: Array, payload: Array, seed: int) -> None:
        self._codec.encode(x.reshape(-1).astype(np.float32, copy=False), payload, seed=seed)

    def read(self, payload: Array, view: Array) -> None:
        if view.dtype == np.float32:
            self._codec.decode(payload, view.reshape(-1))
        else:
            wide = np.empty(view.size, np.float32)
            self._codec.decode(payload, wide)
            with np.errstate(over="ignore", invalid="ignore"):  # rounding to a narrow float may overflow
                view[...] = wide.reshape(view.shape).astype(view.dtype)


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
