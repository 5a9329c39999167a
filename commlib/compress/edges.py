"""Encoded messages for what is no gradient: activations on a pipeline edge, tokens in an exchange between experts.

No residual is kept: an activation is sent once, so that what a codec loses of it cannot be made good later. Gradients
of activations go the same ways back, encoded by whichever codec is chosen for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from commlib.buffers.views import as_host, contiguous
from commlib.compress.codec import Codec
from commlib.dtypes import FLOATS, Array, name_of
from commlib.errors import UsageError

_LENGTH = 8
"""Bytes before each payload of an exchange: how many rows it stands for."""


class Peers(Protocol):
    """What is needed of a communicator."""

    @property
    def size(self) -> int: ...

    def send(self, x: Any, peer: int, tag: int = 0) -> None: ...

    def recv(self, x: Any, peer: int, tag: int = 0) -> Any: ...

    def all_to_all_v(self, x: Any, splits: Sequence[int]) -> Any: ...


def encode(codec: Codec, x: Any, *, seed: int = 0) -> Array:
    """Return the payload (uint8, 1-D) of a floating-point array of any shape. Raises UsageError for other dtypes."""
    array = _floats(x, "encode")
    payload = np.zeros(codec.payload_bytes(array.size), np.uint8)
    return payload[: codec.encode(array, payload, seed=seed)]


def decode(codec: Codec, payload: Array, out: Any) -> Any:
    """Write what a payload stands for to `out`, a contiguous floating-point array of the shape sent, and return it."""
    array = as_host(out, "decode", "out")
    if name_of(array.dtype) not in FLOATS or not array.flags.c_contiguous or not array.flags.writeable:
        raise UsageError(f"decode: out must be a contiguous, writable array of {', '.join(FLOATS)}")
    if array.dtype == np.float32:
        codec.decode(payload, array.reshape(-1))
        return out
    wide = np.empty(array.size, np.float32)
    codec.decode(payload, wide)
    array[...] = wide.reshape(array.shape).astype(array.dtype)
    return out


def send(comm: Peers, codec: Codec, x: Any, peer: int, tag: int = 0, *, seed: int = 0) -> None:
    """Send a floating-point array encoded; the peer calls `recv` with the same codec. Codecs of fixed length only."""
    _check_fixed(codec, "send")
    comm.send(encode(codec, x, seed=seed), peer, tag)


def recv(comm: Peers, codec: Codec, out: Any, peer: int, tag: int = 0) -> Any:
    """Receive what the peer sent by `send` into `out`, an array of the same shape, and return it."""
    _check_fixed(codec, "recv")
    count = as_host(out, "recv", "out").size
    return decode(codec, comm.recv(np.zeros(codec.payload_bytes(count), np.uint8), peer, tag), out)


def all_to_all_v(comm: Peers, codec: Codec, x: Any, splits: Sequence[int], *, seed: int = 0) -> tuple[Array, Array]:
    """Send `splits[i]` rows of `x`, encoded, to rank i; return (rows that came, int64 rows from each rank).

    As `Communicator.all_to_all_v`; each part is encoded by itself. The rows have the dtype of `x`.
    """
    array = as_host(x, "all_to_all_v")
    flat = _floats(array, "all_to_all_v")
    sizes = [int(rows) for rows in splits]
    if array.ndim == 0 or len(sizes) != comm.size or min(sizes) < 0 or sum(sizes) != array.shape[0]:
        raise UsageError(
            f"all_to_all_v: splits {sizes} must be {comm.size} lengths, none negative, that add up to dimension 0 of "
            f"x, whose shape is {array.shape}"
        )
    row = int(np.prod(array.shape[1:], dtype=np.int64))
    messages, start = [], 0
    for peer, rows in enumerate(sizes):
        part = flat[start * row : (start + rows) * row]
        messages += [np.array([rows], "<i8").view(np.uint8), encode(codec, part, seed=seed + peer)]
        start += rows
    lengths = [len(messages[2 * peer]) + len(messages[2 * peer + 1]) for peer in range(comm.size)]
    arrived, received = comm.all_to_all_v(np.concatenate(messages), lengths)
    counts, at = np.empty(comm.size, np.int64), 0
    results = []
    for peer, nbytes in enumerate(map(int, received)):
        counts[peer] = arrived[at : at + _LENGTH].view("<i8")[0]
        values = np.empty(int(counts[peer]) * row, np.float32)
        codec.decode(arrived[at + _LENGTH : at + nbytes], values)
        results.append(values)
        at += nbytes
    rows_here = np.concatenate(results).reshape(int(counts.sum()), *array.shape[1:])
    return rows_here.astype(array.dtype, copy=False), counts


def _check_fixed(codec: Codec, verb: str) -> None:
    if not codec.fixed:
        raise UsageError(f"{verb}: the payload of {codec.name} has no fixed length: the receiver could not expect it")


def _floats(x: Any, verb: str) -> Array:
    array = as_host(x, verb)
    if name_of(array.dtype) not in FLOATS:
        raise UsageError(f"{verb}: codecs are for {', '.join(FLOATS)}, got {name_of(array.dtype)}")
    return contiguous(array, verb).reshape(-1).astype(np.float32, copy=False)
