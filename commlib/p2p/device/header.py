"""DeviceHead: what a channel's host message says of an array on a device.

    tag and dimensions, bytes of note and news, lengths | the rest: note, news, the array if the host carries it

All int64 before the rest. So messages with nothing in the rest have one length, and the host's channel is at its
fastest. They fit into the lines in which it keeps its numbers.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from commlib.dtypes import Array

_FIELDS = 14
HEAD = 8 * _FIELDS
"""Bytes of a message without a rest."""

_DIMENSIONS, _BYTES = 256, 1 << 32  # tags are multiples of the one, bytes of the note of the other


class DeviceHead(NamedTuple):
    """See above. tag, note: the user's. news: of new memory."""

    shape: tuple[int, ...]
    tag: int = 0
    note: bytes = b""
    news: bytes = b""

    @property
    def nbytes(self) -> int:
        """Bytes of the message before the array's."""
        return HEAD + len(self.note) + len(self.news)

    def write(self, message: Array) -> Array:
        """Write it to the beginning of a host message (uint8), and return that."""
        fields = message[:HEAD].view(np.int64)
        fields[0] = self.tag * _DIMENSIONS + len(self.shape)
        fields[1] = len(self.note) * _BYTES + len(self.news)
        fields[2 : 2 + len(self.shape)] = self.shape
        if rest := self.note + self.news:
            message[HEAD : HEAD + len(rest)] = np.frombuffer(rest, np.uint8)
        return message

    @classmethod
    def read(cls, message: Array) -> tuple[DeviceHead, Array]:
        """Return what a host message says, and what is at its end."""
        fields = message[:HEAD].view(np.int64).tolist()
        tag, ndim = divmod(fields[0], _DIMENSIONS)
        note, news = divmod(fields[1], _BYTES)
        at, end = HEAD + note, HEAD + note + news
        head = cls(tuple(fields[2 : 2 + ndim]), tag, message[HEAD:at].tobytes(), message[at:end].tobytes())
        return head, message[end:]
