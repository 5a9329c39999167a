"""Regions: memory of a node's ranks into which tokens are written for each other, taken again once nobody uses it.

A region is symmetric memory of all ranks. Who writes into that of another rank must know that it is free there: so
ranks *meet* (a small all-gather) between any two exchanges, and each says which of its regions is free next. What a
rank lends of a region as an array keeps that one from being free; what it has published at a meeting, for others to
read, is free after the next one.
"""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

import numpy as np

from commlib.buffers.views import address_of
from commlib.communicator import Communicator
from commlib.comparison.agreement import digest_of
from commlib.comparison.parameter_check import check_agreement
from commlib.devices.host import HOST
from commlib.dtypes import Array
from commlib.kernels.host.segments import met

NONE = -1
_HEADROOM = 1.25  # tokens are spread otherwise in each step
_STEPS = 4  # sizes between two powers of two: hardly larger needs do not make regions again and again
_LEAST = 1 << 12


class Meeting:
    """A small all-gather of `count` numbers (int64) of each rank, behind two of its own: see `Regions.meet`."""

    __slots__ = ("every", "gather", "own", "told")

    def __init__(self, comm: Communicator, count: int) -> None:
        self.own, self.every = np.zeros(2 + count, np.int64), np.zeros((comm.size, 2 + count), np.int64)
        self.gather = comm.plan_all_gather(self.own, out=self.every.reshape(-1))
        self.told = self.every[:, 2:]


class Regions:
    """The regions of one group, all on one node. `comm`: a communicator that nothing else uses."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._memory: list[Array | None] = []
        self._owners: list[Any] = []
        """Of each region, a weak reference to what all arrays of it refer to."""
        self._free_at: list[int] = []
        """After how many meetings."""
        self.sizes, self.bases = np.zeros(0, np.int64), np.zeros((0, comm.size), np.int64)
        """Bytes of the regions, and where those of each rank begin in this process."""
        self.next = np.full(comm.size, NONE, np.int64)
        """The region of each rank into which others may write now."""
        self._next = NONE
        self._wanted = 0
        """Bytes that others wrote here last."""
        self._meetings = 0

    def name(self, purpose: str) -> None:
        """Let what waits from now on say so: that it is of this layer and step."""
        self._comm.group.purpose = purpose

    def meet(self, meeting: Meeting, digest: int, what: tuple[object, ...]) -> None:
        """Let all ranks know all numbers of `meeting.own`, from the third on. Collective.

        what, and a digest of it: the exchange, which must be the same on all ranks, or all raise MismatchError.
        """
        if self._next == NONE:
            self._next = self.free(self._wanted)
        own = meeting.own
        own[0], own[1] = digest, self._next
        meeting.gather()
        self._meetings += 1
        if not met(meeting.every, digest, self.next):
            check_agreement(self._comm, "experts", lines(what))

    def written(self, at: int, nbytes: int) -> Array:
        """Return the bytes that others write now into a region of this rank, which it has said to be free."""
        self._next, self._wanted = NONE, nbytes
        return self.lend(at, nbytes)

    def hold(self, at: int) -> None:
        """Note that others read a region of this rank from the next meeting on, until the one after that."""
        self._free_at[at] = self._meetings + 2

    def free(self, nbytes: int) -> int:
        """Return the smallest region of this rank that is free and has so many bytes, or NONE."""
        best, least = NONE, 0
        for at, memory in enumerate(self._memory):
            size = 0 if memory is None else memory.nbytes
            if size > 0 and size >= nbytes and (least == 0 or size < least) and self._is_free(at):
                best, least = at, size
        return best

    def _is_free(self, at: int) -> bool:
        if self._free_at[at] > self._meetings or at == self._next:
            return False
        owner = self._owners[at]
        return owner is None or owner() is None

    def lend(self, at: int, nbytes: int) -> Array:
        """Return some bytes of a region of this rank, which is not free as long as an array of them exists."""
        owner: Any = (ctypes.c_uint8 * nbytes).from_address(int(self.bases[at, self._comm.rank]))
        owner.memory = self._memory[at]  # it may outlive the group
        self._owners[at] = weakref.ref(owner)
        return np.frombuffer(owner, np.uint8) if nbytes else np.empty(0, np.uint8)

    def grow(self, nbytes: int) -> int:
        """Make a region on all ranks with room for so many bytes. Collective."""
        wanted = max(_LEAST, int(nbytes * _HEADROOM))
        step = (1 << wanted.bit_length() - 1) // _STEPS
        for at, small in enumerate(self._memory):  # others keep theirs of it until they do this, too
            if small is not None and 2 * small.nbytes < wanted and self._is_free(at):
                self._memory[at] = None
        memory = self._comm.empty(-(-wanted // step) * step, np.uint8)
        found = self._comm.group.symmetric_on(HOST).find(address_of(memory), memory.nbytes)
        assert found is not None
        self._memory.append(memory)
        self._owners.append(None)
        self._free_at.append(0)
        self.sizes = np.append(self.sizes, memory.nbytes)
        self.bases = np.vstack([self.bases, np.array(found[1], np.int64)])
        return len(self._memory) - 1

    @property
    def nbytes(self) -> int:
        """Bytes of all regions that this rank keeps."""
        return sum(memory.nbytes for memory in self._memory if memory is not None)


def lines(what: tuple[object, ...]) -> list[str]:
    """Return what ranks compare of an exchange."""
    return [str(part) for part in what]


def digest_for(what: tuple[object, ...]) -> int:
    """Return a number that tells exchanges apart."""
    return digest_of(lines(what))
