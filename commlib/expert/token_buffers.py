"""Token buffers: memory of a node's ranks into which tokens are written for each other, reused once it is free.

A region is symmetric memory of all ranks. A rank may write into another rank's region only while it is free. So ranks
meet in a small all-gather between any two exchanges, and each announces its next free region. A region lent as an
array is not free while the array exists. A region published at an exchange, for others to read, is free after the next
exchange.
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
from commlib.kernels.host.dispatch_plan import read_choices

NONE = -1
_HEADROOM = 1.25  # each step distributes tokens differently
_STEPS = 4  # sizes between two powers of two: slightly larger needs do not make new regions again and again
_LEAST = 1 << 12


class CountExchange:
    """A small all-gather of `count` numbers (int64) of each rank, after two internal ones.

    See `TokenBuffers.synchronize`.
    """

    __slots__ = ("counts", "every", "gather", "own")

    def __init__(self, comm: Communicator, count: int) -> None:
        self.own, self.every = np.zeros(2 + count, np.int64), np.zeros((comm.size, 2 + count), np.int64)
        self.gather = comm.plan_all_gather(self.own, out=self.every.reshape(-1))
        self.counts = self.every[:, 2:]


class TokenBuffers:
    """The regions of one group, all on one node. `comm`: used for nothing else."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._memory: list[Array | None] = []
        self._owners: list[Any] = []
        """For each region, a weak reference to the owner of all arrays of it."""
        self._free_at: list[int] = []
        """The number of exchanges after which each region is free."""
        self.sizes, self.bases = np.zeros(0, np.int64), np.zeros((0, comm.size), np.int64)
        """Bytes of the regions, and the address of each rank's copy in this process."""
        self.next = np.full(comm.size, NONE, np.int64)
        """The region of each rank into which others may write now."""
        self._next = NONE
        self._wanted = 0
        """Bytes that others wrote here last."""
        self._exchanges = 0

    def name(self, purpose: str) -> None:
        """Set the purpose, a layer and step, that the group reports for calls that wait from now on."""
        self._comm.group.waits.purpose = purpose

    def synchronize(self, exchange: CountExchange, digest: int, what: tuple[object, ...]) -> None:
        """All-gather the numbers of `exchange.own`, from the third on. Collective.

        what, and a digest of it: the exchange, which must be the same on all ranks; otherwise all raise MismatchError.
        """
        if self._next == NONE:
            self._next = self.free(self._wanted)
        own = exchange.own
        own[0], own[1] = digest, self._next
        exchange.gather()
        self._exchanges += 1
        if not read_choices(exchange.every, digest, self.next):
            check_agreement(self._comm, "experts", lines(what))

    def written(self, at: int, nbytes: int) -> Array:
        """Return the bytes that others write now into a region of this rank, which it has announced as free."""
        self._next, self._wanted = NONE, nbytes
        return self.lend(at, nbytes)

    def hold(self, at: int) -> None:
        """Note that others read a region of this rank from the next exchange until the one after it."""
        self._free_at[at] = self._exchanges + 2

    def free(self, nbytes: int) -> int:
        """Return the smallest free region of this rank with at least `nbytes` bytes, or NONE."""
        best, least = NONE, 0
        for at, memory in enumerate(self._memory):
            size = 0 if memory is None else memory.nbytes
            if size > 0 and size >= nbytes and (least == 0 or size < least) and self._is_free(at):
                best, least = at, size
        return best

    def _is_free(self, at: int) -> bool:
        if self._free_at[at] > self._exchanges or at == self._next:
            return False
        owner = self._owners[at]
        return owner is None or owner() is None

    def lend(self, at: int, nbytes: int) -> Array:
        """Return the first bytes of a region of this rank; it is not free while an array of it exists."""
        owner: Any = (ctypes.c_uint8 * nbytes).from_address(int(self.bases[at, self._comm.rank]))
        owner.memory = self._memory[at]  # may outlive the group
        self._owners[at] = weakref.ref(owner)
        return np.frombuffer(owner, np.uint8) if nbytes else np.empty(0, np.uint8)

    def grow(self, nbytes: int) -> int:
        """Make a region of at least `nbytes` bytes on all ranks. Collective."""
        wanted = max(_LEAST, int(nbytes * _HEADROOM))
        step = (1 << wanted.bit_length() - 1) // _STEPS
        for at, small in enumerate(self._memory):  # others keep their mapping until they call this, too
            if small is not None and 2 * small.nbytes < wanted and self._is_free(at):
                self._memory[at] = None
        memory = self._comm.empty(-(-wanted // step) * step, np.uint8)
        location = self._comm.group.symmetric_on(HOST).find(address_of(memory), memory.nbytes)
        assert location is not None
        self._memory.append(memory)
        self._owners.append(None)
        self._free_at.append(0)
        self.sizes = np.append(self.sizes, memory.nbytes)
        self.bases = np.vstack([self.bases, np.array(location[1], np.int64)])
        return len(self._memory) - 1

    @property
    def nbytes(self) -> int:
        """Bytes of all regions of this rank."""
        return sum(memory.nbytes for memory in self._memory if memory is not None)


def lines(what: tuple[object, ...]) -> list[str]:
    """Return the parts of an exchange as texts, for comparison between ranks."""
    return [str(part) for part in what]


def digest_for(what: tuple[object, ...]) -> int:
    """Return a digest that identifies an exchange."""
    return digest_of(lines(what))
