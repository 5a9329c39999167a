"""Message: lay out several arrays, of any dtypes and shapes, as one message of bytes.

    header: layout number, bytes of the text | first array | padding to 64 | second array | ... | text

The layout has the position and type of each array. Its text is sent once, with the first message that uses it. So there
is one message for each microbatch even if the layout changes, and channels need not be deeper.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from commlib.compress.codec import Codec
from commlib.dtypes import FLOATS, name_of, numpy_dtype

NUMBER, TEXT_BYTES = 0, 1
"""Fields of the header, int64."""

HEAD = 64
"""Bytes before the first array: aligns all arrays for caches and for TensorFlow."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One array of a message. gradient: the receiver must send its gradient back. coded: it is sent encoded."""

    dtype: str
    shape: tuple[int, ...]
    gradient: bool
    coded: bool
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class MessageLayout:
    """The layout of a message: a piece for each value, None for a missing one; and the note of the values."""

    pieces: tuple[Piece | None, ...]
    note: str
    nbytes: int

    @classmethod
    def of(
        cls, arrays: Sequence[Any], gradients: Sequence[bool], note: str = "", codec: Codec | None = None
    ) -> MessageLayout:
        """Lay out host or device arrays in this order. With a codec, floats are encoded."""
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
        """Return the arrays in a message; for an encoded array, its payload as bytes."""
        return [None if piece is None else _view(message, piece) for piece in self.pieces]

    def to_bytes(self) -> bytes:
        """Return the layout as text, for `read`."""
        fields = [piece and [getattr(piece, name) for name in Piece.__slots__] for piece in self.pieces]
        return json.dumps([self.nbytes, self.note, fields]).encode()

    @classmethod
    def read(cls, text: bytes) -> MessageLayout:
        """Return the layout that `to_bytes` wrote on another rank."""
        nbytes, note, fields = json.loads(text)
        pieces = [piece and Piece(piece[0], tuple(piece[1]), *piece[2:]) for piece in fields]
        return cls(tuple(pieces), note, nbytes)


def _view(message: Any, piece: Piece) -> Any:
    payload = message[piece.start : piece.start + piece.nbytes]
    return payload if piece.coded else payload.view(numpy_dtype(piece.dtype)).reshape(piece.shape)
