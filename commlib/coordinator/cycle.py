"""Cycle: exchange announcements in one small all-reduce, and requests in words only if some rank has any.

    announcement: | flags | bits of cached names ............ |   combined by "and", so flags say what a rank has *not*
    words:        | length | pickled requests | of each rank, of fixed length if those of all ranks are short

Unpickling runs code: ranks trust each other.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np

from commlib.coordinator.negotiation import Announcement, RequestList
from commlib.coordinator.request import Request

_NO_REQUESTS, _NO_QUESTION, _FITS = 1, 2, 4
_QUIET = _NO_REQUESTS | _NO_QUESTION | _FITS

_WORDS_BYTES = 512
_LENGTH_BYTES = 2


class Cycle:
    """Run one cycle after another among the ranks of `comm`, an exchange each."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        self._words = np.zeros(_WORDS_BYTES, np.uint8)

    def run(
        self, announcement: Announcement, question: bool, in_full: Callable[[], RequestList]
    ) -> tuple[list[int], list[RequestList]]:
        """Return (the bits that all ranks announced, the request list of each rank if any is not empty). Collective.

        question: this rank wants to know what all ranks wait for; they then tell what `in_full` returns.
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
    told = pickle.loads(words[_LENGTH_BYTES : _LENGTH_BYTES + length])
    return RequestList(tuple(Request(*fields) for fields in told))


_NOTHING = RequestList()


def _as_words(announcement: Announcement, flags: int) -> Any:
    """Return flags and bits as uint64, in as few different lengths as can be: each is a kind of call of its own."""
    width = -(-announcement.width // 64)
    words = 1 << (width - 1).bit_length() if width else 0
    data = (announcement.bits << 64 | flags).to_bytes(8 * (1 + words), "little")
    return np.frombuffer(bytearray(data), np.uint64)


def _set_bits(words: Any) -> list[int]:
    if not words.any():
        return []
    return [int(bit) for bit in np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))]
