"""Send encoded activations: between pipeline stages, or as tokens to experts.

There is no residual: an activation is sent once, so a later message cannot correct the codec's error. Gradients of
activations return over the same links, encoded by the codec chosen for them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from commlib.compress.codec import Codec
from commlib.compress.memory import Memory
from commlib.devices.arrays import as_contiguous, as_writable, device_of, empty_like, is_contiguous
from commlib.dtypes import FLOATS, Array, name_of
from commlib.errors import UsageError

_LENGTH = 8
"""Bytes before each payload that hold its number of rows. Payloads are padded to a multiple of them."""


class ActivationRanks(Protocol):
    """The part of a communicator that this module needs."""

    @property
    def size(self) -> int: ...

    def send(self, x: Any, peer: int, tag: int = 0) -> None: ...

    def recv(self, x: Any, peer: int, tag: int = 0) -> Any: ...

    def all_to_all_v(self, x: Any, splits: Sequence[int]) -> Any: ...

    def watch(self, text: str) -> Callable[[], None]: ...


def encode(codec: Codec, x: Any, *, seed: int = 0) -> Any:
    """Return the payload (uint8, 1-D) of a floating-point array of any shape, on the array's device.

    Raises UsageError for other dtypes.
    """
    flat = _as_float32(as_contiguous(x, "encode"), "encode")
    payload = _zeros(flat, codec.payload_bytes(flat.size))
    return payload[: codec.encode(flat, payload, seed=seed)]


def decode(codec: Codec, payload: Any, out: Any) -> Any:
    """Decode a payload into `out`, a contiguous floating-point array of the shape sent, and return `out`."""
    array = _check_output(as_writable(out, "decode", "out"))
    flat = array.reshape(-1)
    if array.dtype == np.float32:
        codec.decode(payload, flat)
        return out
    wide = empty_like(flat, flat.size, np.float32)
    codec.decode(payload, wide)
    device_of(flat).kernels.cast(wide, flat)
    return out


def send(comm: ActivationRanks, codec: Codec, x: Any, peer: int, tag: int = 0, *, seed: int = 0) -> None:
    """Send a floating-point array, encoded. The peer calls `recv` with the same codec. Codecs of fixed length only."""
    _check_fixed(codec, "send")
    comm.send(encode(codec, x, seed=seed), peer, tag)


def recv(comm: ActivationRanks, codec: Codec, out: Any, peer: int, tag: int = 0) -> Any:
    """Receive an array that the peer sent by `send` into `out`, an array of the same shape, and return `out`."""
    _check_fixed(codec, "recv")
    array = _check_output(as_writable(out, "recv", "out"))
    return decode(codec, comm.recv(_zeros(array, codec.payload_bytes(array.size)), peer, tag), out)


def all_to_all_v(
    comm: ActivationRanks, codec: Codec, x: Any, splits: Sequence[int], *, seed: int = 0
) -> tuple[Any, Array]:
    """Send `splits[i]` rows of `x`, encoded, to rank i; return (received rows, int64 row counts per rank).

    As `Communicator.all_to_all_v`, but each part is encoded separately. The rows have the dtype and the device of `x`.
    """
    array = as_contiguous(x, "all_to_all_v")
    flat = _as_float32(array, "all_to_all_v")
    sizes = [int(rows) for rows in splits]
    if array.ndim == 0 or len(sizes) != comm.size or min(sizes) < 0 or sum(sizes) != array.shape[0]:
        raise UsageError(
            f"all_to_all_v: splits {sizes} must be {comm.size} non-negative lengths that add up to dimension 0 of x, "
            f"whose shape is {array.shape}"
        )
    memory, row = Memory(device_of(array), comm.watch), math.prod(array.shape[1:])
    message = memory.zeros(sum(_LENGTH + _round_up(codec.payload_bytes(rows * row)) for rows in sizes), np.uint8)
    lengths, start, at = [], 0, 0
    for peer, rows in enumerate(sizes):
        memory.put(message[at : at + _LENGTH], np.array([rows], "<i8").view(np.uint8))
        part, room = flat[start * row : (start + rows) * row], message[at + _LENGTH :]
        lengths.append(_LENGTH + _round_up(codec.encode(part, room, seed=seed + peer)))
        start, at = start + rows, at + lengths[-1]
    payload, received = comm.all_to_all_v(message[:at], lengths)
    arrived, ends = as_contiguous(payload, "all_to_all_v"), np.cumsum(received).tolist()
    parts = [arrived[end - int(nbytes) : end] for end, nbytes in zip(ends, received, strict=True)]
    heads = memory.on_host(*(part[:_LENGTH] for part in parts))
    counts = np.array([head.view("<i8")[0] for head in heads], np.int64)
    result = memory.device.empty((int(counts.sum()), *array.shape[1:]), array.dtype)
    target, at = memory.device.wrap(result, "all_to_all_v"), 0
    for part, rows in zip(parts, counts.tolist(), strict=True):
        decode(codec, part[_LENGTH:], target[at : at + rows])
        at += rows
    return result, counts


def _check_fixed(codec: Codec, verb: str) -> None:
    if not codec.fixed:
        raise UsageError(
            f"{verb}: the payload of {codec.name} has no fixed length, so the receiver cannot allocate memory for it"
        )


def _check_output(array: Any) -> Any:
    if name_of(array.dtype) not in FLOATS or not is_contiguous(array):
        raise UsageError(f"decode: out must be a contiguous, writable array of {', '.join(FLOATS)}")
    return array


def _as_float32(array: Any, verb: str) -> Any:
    """Return a contiguous array as 1-D float32. Other floating-point dtypes are copied."""
    if name_of(array.dtype) not in FLOATS:
        raise UsageError(f"{verb}: codecs take {', '.join(FLOATS)}, got {name_of(array.dtype)}")
    flat = array.reshape(-1)
    if array.dtype == np.float32:
        return flat
    wide = empty_like(flat, flat.size, np.float32)
    device_of(flat).kernels.cast(flat, wide)
    return wide


def _zeros(like: Any, nbytes: int) -> Any:
    """Return a new byte array of zeros on the device of `like`."""
    array = empty_like(like, nbytes, np.uint8)
    device_of(like).kernels.fill(array, 0)
    return array


def _round_up(length: int) -> int:
    return -(-length // _LENGTH) * _LENGTH
