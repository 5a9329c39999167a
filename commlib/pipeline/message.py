"""Message: lay out several arrays as one message of bytes, for any dtypes and shapes.

    head: number of the terms, bytes of their text | first array | padding to 64 | second array | ... | text

Terms say what is where. Their text is sent once, with the first message that needs them: so there is one message for
each microbatch, whatever changes, and channels need not be deeper.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from commlib.compress.codec import Codec
from commlib.dtypes import FLOATS, name_of, numpy_dtype

NUMBER, TEXT_BYTES = 0, 1
"""Fields of the head, int64."""

HEAD = 64
"""Bytes before the first array: so all of them lie as caches, and TensorFlow, want them."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One array of a message. gradient: the receiver is to send its gradient back. coded: it travels encoded."""

    dtype: str
    shape: tuple[int, ...]
    gradient: bool
    coded: bool
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Terms:
    """What a message holds: a piece for each value, None where there is none; and the values' note."""

    pieces: tuple[Piece | None, ...]
    note: str
    nbytes: int

    @classmethod
    def of(cls, arrays: Sequence[Any], gradients: Sequence[bool], note: str = "", codec: Codec | None = None) -> Terms:
        """Lay out arrays, of the host or of a device, in this order. Floats are encoded if there is a codec."""
        pieces: list[Piece | None] = []
        end = HEAD
        for array, gradient in zip(arrays, gradients, strict=True):
            if array is None:
                pieces.append(None)
                continue
            name = name_of(array.dtype)
            coded = codec is not None and name in FLOATS
            nbytes = codec.payload_bytes(array.size) if codec is not None and coded else array.nbytes
            pieces.append(Piece(name, array.shape, gradient, coded, end, nbytes))
            end += -(-nbytes // HEAD) * HEAD
        return cls(tuple(pieces), note, end)

    def views(self, message: Any) -> list[Any]:
        """Return the arrays in a message; a payload of bytes for one that is encoded."""
        return [None if piece is None else _view(message, piece) for piece in self.pieces]

    def to_bytes(self) -> bytes:
        """Return a text from which `read` makes the same."""
        fields = [piece and [getattr(piece, name) for name in Piece.__slots__] for piece in self.pieces]
        return json.dumps([self.nbytes, self.note, fields]).encode()

    @classmethod
    def read(cls, text: bytes) -> Terms:
        """Return what another rank's `to_bytes` says."""
        nbytes, note, fields = json.loads(text)
        pieces = [piece and Piece(piece[0], tuple(piece[1]), *piece[2:]) for piece in fields]
        return cls(tuple(pieces), note, nbytes)


def _view(message: Any, piece: Piece) -> Any:
    payload = message[piece.start : piece.start + piece.nbytes]
    return payload if piece.coded else payload.view(numpy_dtype(piece.dtype)).reshape(piece.shape)
