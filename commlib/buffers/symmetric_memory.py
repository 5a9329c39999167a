"""Symmetric memory: arrays that every rank of a node maps, at the same offset in the same segment.

All ranks allocate a segment collectively; it holds one array per rank. They release it, collectively, once the arrays
of all ranks in it are freed. Ranks drop their arrays at different times, so they agree on it at the next allocation,
which is collective anyway.
"""

from __future__ import annotations

import bisect
import ctypes
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from commlib.buffers.views import address_of
from commlib.protocols import SharedMemory


class _Segment:
    __slots__ = ("bases", "identity", "memory", "owner", "start")

    def __init__(self, identity: int, memory: SharedMemory, rank: int) -> None:
        self.identity, self.memory, self.bases = identity, memory, list(memory.bases)
        self.start = self.bases[rank]
        # Views keep the owner alive through `base`, so it dies with the last array in the segment.
        self.owner: Any = None


class SymmetricMemory:
    """The symmetric segments of one group on one node. share: creates memory; agree: all-gathers an object."""

    def __init__(self, rank: int, share: Callable[[int], SharedMemory], agree: Callable[[Any], list[Any]]) -> None:
        self._rank, self._share, self._agree = rank, share, agree
        self._segments: dict[int, _Segment] = {}
        self._starts: list[tuple[int, int]] = []  # (start, identity), sorted
        self._made = 0
        self._unmade: set[int] = set()
        self._places, self._rows = np.zeros(2, np.int64), np.zeros(0, np.int64)

    @property
    def places(self) -> int:
        """The address of the table of all segments, for `kernels.host.call_routes`; it never changes."""
        return address_of(self._places)

    def _write_places(self) -> None:
        segments = [self._segments[identity] for _, identity in self._starts]
        rows = [(s.start, s.start + s.memory.nbytes, s.identity, *s.bases) for s in segments]
        self._rows = np.array(rows, np.int64).reshape(-1)
        self._places[:] = address_of(self._rows), len(rows)

    def __len__(self) -> int:
        """Return the number of mapped segments."""
        return len(self._segments)

    def allocate(self, nbytes: int) -> Any:
        """Return a zeroed uint8 array of `nbytes`. Collective."""
        self._release_dead()
        self._made += 1
        try:
            memory = self._share(max(nbytes, 1))
        except BaseException:
            self._unmade.add(self._made)  # on this node; another node may have its segment of this number
            raise
        segment = _Segment(self._made, memory, self._rank)
        owner: Any = (ctypes.c_uint8 * nbytes).from_address(segment.start)
        owner.memory = memory  # an array may outlive the group
        segment.owner = weakref.ref(owner)
        self._segments[segment.identity] = segment
        bisect.insort(self._starts, (segment.start, segment.identity))
        self._write_places()
        return np.frombuffer(owner, np.uint8) if nbytes else np.empty(0, np.uint8)

    def _release_dead(self) -> None:
        dead = {identity for identity, segment in self._segments.items() if segment.owner() is None} | self._unmade
        for identity in sorted(set.intersection(*map(set, self._agree(dead)))):
            if identity in self._unmade:
                self._unmade.remove(identity)
                continue
            segment = self._segments.pop(identity)
            self._starts.remove((segment.start, identity))
            self._write_places()  # before the memory is unmapped
            segment.memory.close()

    def find(self, address: int, nbytes: int) -> tuple[int, list[int]] | None:
        """Return the symmetric place of an array of this rank, or None if it is not in symmetric memory.

        The place is (a number, equal on all ranks exactly if their arrays correspond; the addresses, in this process,
        of the corresponding arrays of all ranks).
        """
        index = bisect.bisect_right(self._starts, (address, self._made + 1)) - 1
        if index < 0:
            return None
        segment = self._segments[self._starts[index][1]]
        offset = address - segment.start
        if offset + nbytes > segment.memory.nbytes:
            return None
        return segment.identity << 44 | offset, [base + offset for base in segment.bases]

    def close(self) -> None:
        """Release all segments. An array in use keeps its segment mapped."""
        for segment in self._segments.values():
            if segment.owner() is None:
                segment.memory.close()
        self._segments.clear()
        self._starts.clear()
        self._write_places()
