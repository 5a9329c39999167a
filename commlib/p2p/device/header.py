"""Device header: the description of a device array in a channel's host message.

    tag and ndim, bytes of note and news, shape | the rest: note, news, and the array if the host message carries it

The fields before the rest are int64. Messages with an empty rest all have the same length, for which the host channel
is fastest: they fit into the cache lines of its slot headers.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from commlib.dtypes import Array

_FIELDS = 14
HEAD = 8 * _FIELDS
"""Bytes of a message with an empty rest."""

_DIMENSIONS, _BYTES = 256, 1 << 32  # the factors by which a tag and the bytes of a note are packed


class Header(NamedTuple):
    """The header of a message. tag, note: the user's. news: describes new slot memory of the sender, if any."""

    shape: tuple[int, ...]
    tag: int = 0
    note: bytes = b""
    news: bytes = b""

    @property
    def nbytes(self) -> int:
        """Bytes of the message before the array."""
        return HEAD + len(self.note) + len(self.news)

    def write(self, message: Array) -> Array:
        """Write the header to the start of a host message (uint8); return the message."""
        fields = message[:HEAD].view(np.int64)
        fields[0] = self.tag * _DIMENSIONS + len(self.shape)
        fields[1] = len(self.note) * _BYTES + len(self.news)
        fields[2 : 2 + len(self.shape)] = self.shape
        if rest := self.note + self.news:
            message[HEAD : HEAD + len(rest)] = np.frombuffer(rest, np.uint8)
        return message

    @classmethod
    def read(cls, message: Array) -> tuple[Header, Array]:
        """Return the header of a host message, and the bytes after it."""
        fields = message[:HEAD].view(np.int64).tolist()
        tag, ndim = divmod(fields[0], _DIMENSIONS)
        note, news = divmod(fields[1], _BYTES)
        at, end = HEAD + note, HEAD + note + news
        head = cls(tuple(fields[2 : 2 + ndim]), tag, message[HEAD:at].tobytes(), message[at:end].tobytes())
        return head, message[end:]
