"""Cycle: exchange announcements in one small all-reduce, and full requests only if some rank has any.

    announcement: | flags | bits of cached names ............ |   combined by "and": a flag means "no rank has any"
    words:        | length | pickled requests | from each rank, of fixed length if the data of all ranks is short

Unpickling runs code: ranks trust each other.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np

from commlib.coordinator.negotiation import Announcement, RequestList
from commlib.coordinator.op_request import OpRequest

_NO_REQUESTS, _NO_QUESTION, _FITS = 1, 2, 4
_QUIET = _NO_REQUESTS | _NO_QUESTION | _FITS

_WORDS_BYTES = 512
_LENGTH_BYTES = 2


class Cycle:
    """Runs cycles among the ranks of `comm`, one exchange each."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        self._words = np.zeros(_WORDS_BYTES, np.uint8)

    def run(
        self, announcement: Announcement, question: bool, in_full: Callable[[], RequestList]
    ) -> tuple[list[int], list[RequestList]]:
        """Return (the bits that all ranks announced, the request list of each rank if any is not empty). Collective.

        question: this rank needs to know which operations all ranks wait for. Then all ranks exchange the result of
        `in_full`.
        """
        requests = announcement.requests
        data = pickle.dumps([tuple(request) for request in requests]) if requests else b""
        fits = len(data) <= _WORDS_BYTES - _LENGTH_BYTES
        flags = (0 if requests else _NO_REQUESTS) | (0 if question else _NO_QUESTION) | (_FITS if fits else 0)
        words = _as_words(announcement, flags)
        self._comm.all_reduce(words, "and", out=words)
        common = int(words[0])
        if common == _QUIET:
            lists = []
        elif not common & _NO_QUESTION:
            lists = self._comm.all_gather_object(in_full())
        elif common & _FITS:
            lists = self._gather_short(data)
        else:
            lists = self._comm.all_gather_object(RequestList(requests))
        return _set_bits(words[1:]), lists

    def _gather_short(self, data: bytes) -> list[RequestList]:
        words = self._words
        words[:_LENGTH_BYTES] = np.frombuffer(len(data).to_bytes(_LENGTH_BYTES, "little"), np.uint8)
        words[_LENGTH_BYTES : _LENGTH_BYTES + len(data)] = np.frombuffer(data, np.uint8)
        everyone = self._comm.all_gather(words).tobytes()
        return [_read(everyone[start : start + _WORDS_BYTES]) for start in range(0, len(everyone), _WORDS_BYTES)]


def _read(words: bytes) -> RequestList:
    length = int.from_bytes(words[:_LENGTH_BYTES], "little")
    if not length:
        return _NOTHING
    tuples = pickle.loads(words[_LENGTH_BYTES : _LENGTH_BYTES + length])
    return RequestList(tuple(OpRequest(*fields) for fields in tuples))


_NOTHING = RequestList()


def _as_words(announcement: Announcement, flags: int) -> Any:
    """Return flags and bits as uint64. The length is a power of two, because each length makes a new call."""
    width = -(-announcement.width // 64)
    words = 1 << (width - 1).bit_length() if width else 0
    data = (announcement.bits << 64 | flags).to_bytes(8 * (1 + words), "little")
    return np.frombuffer(bytearray(data), np.uint64)


def _set_bits(words: Any) -> list[int]:
    if not words.any():
        return []
    return [int(bit) for bit in np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))]
