"""Send activations encoded: on a pipeline edge, or as tokens in an exchange between experts.

No residual is kept: an activation is sent once, so that what a codec loses of it cannot be made good later. Gradients
of activations go the same ways back, encoded by whichever codec is chosen for them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from commlib.compress.codec import Codec
from commlib.compress.memory import Memory
from commlib.devices.arrays import device_of, empty_like, is_contiguous, readable, written
from commlib.dtypes import FLOATS, Array, name_of
from commlib.errors import UsageError

_LENGTH = 8
"""Bytes before each payload of an exchange: how many rows it stands for. Payloads take a multiple of them."""


class Peers(Protocol):
    """A communicator, as far as it is needed here."""

    @property
    def size(self) -> int: ...

    def send(self, x: Any, peer: int, tag: int = 0) -> None: ...

    def recv(self, x: Any, peer: int, tag: int = 0) -> Any: ...

    def all_to_all_v(self, x: Any, splits: Sequence[int]) -> Any: ...

    def watch(self, text: str) -> Callable[[], None]: ...


def encode(codec: Codec, x: Any, *, seed: int = 0) -> Any:
    """Return the payload (uint8, 1-D) of a floating-point array of any shape, as a DeviceArray if that is on a device.

    Raises UsageError for other dtypes.
    """
    flat = _floats(readable(x, "encode"), "encode")
    payload = _zeros(flat, codec.payload_bytes(flat.size))
    return payload[: codec.encode(flat, payload, seed=seed)]


def decode(codec: Codec, payload: Any, out: Any) -> Any:
    """Write what a payload stands for to `out`, a contiguous floating-point array of the shape sent, and return it."""
    array = _checked(written(out, "decode", "out"))
    flat = array.reshape(-1)
    if array.dtype == np.float32:
        codec.decode(payload, flat)
        return out
    wide = empty_like(flat, flat.size, np.float32)
    codec.decode(payload, wide)
    device_of(flat).kernels.cast(wide, flat)
    return out


def send(comm: Peers, codec: Codec, x: Any, peer: int, tag: int = 0, *, seed: int = 0) -> None:
    """Send a floating-point array encoded; the peer calls `recv` with the same codec. Codecs of fixed length only."""
    _check_fixed(codec, "send")
    comm.send(encode(codec, x, seed=seed), peer, tag)


def recv(comm: Peers, codec: Codec, out: Any, peer: int, tag: int = 0) -> Any:
    """Receive what the peer sent by `send` into `out`, an array of the same shape, and return it."""
    _check_fixed(codec, "recv")
    array = _checked(written(out, "recv", "out"))
    return decode(codec, comm.recv(_zeros(array, codec.payload_bytes(array.size)), peer, tag), out)


def all_to_all_v(comm: Peers, codec: Codec, x: Any, splits: Sequence[int], *, seed: int = 0) -> tuple[Any, Array]:
    """Send `splits[i]` rows of `x`, encoded, to rank i; return (rows that came, int64 rows from each rank).

    As `Communicator.all_to_all_v`; each part is encoded by itself. The rows have the dtype and the device of `x`.
    """
    array = readable(x, "all_to_all_v")
    flat = _floats(array, "all_to_all_v")
    sizes = [int(rows) for rows in splits]
    if array.ndim == 0 or len(sizes) != comm.size or min(sizes) < 0 or sum(sizes) != array.shape[0]:
        raise UsageError(
            f"all_to_all_v: splits {sizes} must be {comm.size} lengths, none negative, that add up to dimension 0 of "
            f"x, whose shape is {array.shape}"
        )
    memory, row = Memory(device_of(array), comm.watch), math.prod(array.shape[1:])
    message = memory.zeros(sum(_LENGTH + _up(codec.payload_bytes(rows * row)) for rows in sizes), np.uint8)
    lengths, start, at = [], 0, 0
    for peer, rows in enumerate(sizes):
        memory.put(message[at : at + _LENGTH], np.array([rows], "<i8").view(np.uint8))
        part, room = flat[start * row : (start + rows) * row], message[at + _LENGTH :]
        lengths.append(_LENGTH + _up(codec.encode(part, room, seed=seed + peer)))
        start, at = start + rows, at + lengths[-1]
    came, received = comm.all_to_all_v(message[:at], lengths)
    arrived, ends = readable(came, "all_to_all_v"), np.cumsum(received).tolist()
    parts = [arrived[end - int(nbytes) : end] for end, nbytes in zip(ends, received, strict=True)]
    heads = memory.on_host(*(part[:_LENGTH] for part in parts))
    counts = np.array([head.view("<i8")[0] for head in heads], np.int64)
    made = memory.device.empty((int(counts.sum()), *array.shape[1:]), array.dtype)
    target, at = memory.device.wrap(made, "all_to_all_v"), 0
    for part, rows in zip(parts, counts.tolist(), strict=True):
        decode(codec, part[_LENGTH:], target[at : at + rows])
        at += rows
    return made, counts


def _check_fixed(codec: Codec, verb: str) -> None:
    if not codec.fixed:
        raise UsageError(f"{verb}: the payload of {codec.name} has no fixed length: the receiver could not expect it")


def _checked(array: Any) -> Any:
    if name_of(array.dtype) not in FLOATS or not is_contiguous(array):
        raise UsageError(f"decode: out must be a contiguous, writable array of {', '.join(FLOATS)}")
    return array


def _floats(array: Any, verb: str) -> Any:
    """Return a contiguous array as 1-D float32, a copy if it is of another floating-point dtype."""
    if name_of(array.dtype) not in FLOATS:
        raise UsageError(f"{verb}: codecs are for {', '.join(FLOATS)}, got {name_of(array.dtype)}")
    flat = array.reshape(-1)
    if array.dtype == np.float32:
        return flat
    wide = empty_like(flat, flat.size, np.float32)
    device_of(flat).kernels.cast(flat, wide)
    return wide


def _zeros(like: Any, nbytes: int) -> Any:
    """Return new bytes of the device of an array."""
    made = empty_like(like, nbytes, np.uint8)
    device_of(like).kernels.fill(made, 0)
    return made


def _up(length: int) -> int:
    return -(-length // _LENGTH) * _LENGTH
