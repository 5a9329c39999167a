"""NodeEnd: hold what the two ends of a channel's direction share on a node. Both sides use the receiver's inbox.

The compiled part is `kernels.host.channel`. This is the memory, what happens where a shape changes, and long waits.

The receiver makes the inbox when it opens the channel. A message that is too long for its slots takes memory that the
sender makes, and describes in the slot's head: so the sender never waits for the receiver to make room for it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from commlib.buffers.peer_memory import Mapped
from commlib.dtypes import Array
from commlib.kernels.host import arrays
from commlib.kernels.host import channel as kernels
from commlib.p2p.channels.payload import Form, Shape
from commlib.transport.base import WaitHook

# How long one kernel call waits before it comes back to Python to look around: spins, yields, then 1 ms of naps; and
# after many of those with fewer, longer naps, as on the board.
_YIELDS, _NAPS, _NAP_MICROSECONDS = 2000, 20, 50
_MANY_WAITS, _LONG_NAPS, _LONG_NAP_MICROSECONDS = 150, 5, 2000
_WAITING_FIELDS = [kernels.SPINS, kernels.YIELDS, kernels.NAPS, kernels.NAP_MICROSECONDS]

# From here on a message is written past the caches: two slots and what they are copied from fill them.
_STREAMED_BYTES = 8 << 20

_ALIGNMENT, _PAGE = 128, 4096
GROWTH = 1.5  # by how much slots grow at least, so that they seldom do
BLOCK_BYTES = 128  # before the heads: int64 numbers of the memories of the other rank that this one has mapped
MAPPED_BY_SENDER, MAPPED_BY_RECEIVER = 0, 8

ARRAYS_ARE_WHERE_EXPECTED = arrays.are_where_expected()


def waiting_fields(spins: int) -> tuple[int, int, int, int]:
    """Return how long one call of a kernel waits: polls, yields, naps, and microseconds of each."""
    return spins, _YIELDS, _NAPS, _NAP_MICROSECONDS


def _only_polls(spins: int) -> tuple[int, int, int, int]:
    """Return the same for calls whose end a signal handler can hide: so Python is soon where that is told apart."""
    return spins, 0, 0, _NAP_MICROSECONDS


def stride_of(nbytes: int) -> int:
    return max(_ALIGNMENT, -(-nbytes // _ALIGNMENT) * _ALIGNMENT)


class NodeEnd:
    """Hold what the kernels know of one end, and the slots' memory."""

    def __init__(self, form: Form, shape: Shape, dtype: np.dtype[Any], depth: int, spins: int) -> None:
        self.form, self.shape, self._dtype, self.depth = form, shape, dtype, depth
        self._end = np.zeros(kernels.END_FIELDS, np.int64)
        self.at: int = self._end.ctypes.data
        self._end[kernels.DEPTH] = depth
        self._end[_WAITING_FIELDS] = self._usual = _only_polls(spins)
        self._patient = waiting_fields(spins)
        self._end[kernels.STREAMED] = _STREAMED_BYTES
        self._is_halted, self._is_deferred = True, False
        self._end[kernels.HALTED] = 1  # until both ends know each other
        self._memory: Mapped | None = None  # of the heads
        self._slots: list[Array] = []

    @property
    def count(self) -> int:
        """How many messages this end has put, or taken."""
        return int(self._end[kernels.COUNT])

    def halt(self, *, yes: bool) -> None:
        """Let every kernel return STOPPED, or no more."""
        self._is_halted = yes
        self._end[kernels.HALTED] = yes or self._is_deferred

    def _lay_out(self, memory: Mapped, offset: int, stride: int, heads: int | None = None) -> None:
        """Let the slots be in `memory`, from `offset` on; without one, in the heads."""
        self._slots = [memory.array(offset + slot * stride, stride) for slot in range(self.depth)]
        self._end[kernels.DATA], self._end[kernels.STRIDE] = memory.address + offset, stride

    def _lay_out_inbox(self, memory: Mapped, nbytes: int) -> None:
        """Let heads and slots be where `inbox_bytes` has room for them."""
        self._memory = memory
        self._end[kernels.HEADS] = memory.address + BLOCK_BYTES
        self._block = memory.array(0, BLOCK_BYTES).view(np.int64)
        self._records = [
            memory.array(BLOCK_BYTES + slot * kernels.HEAD_BYTES + kernels.RECORD_AT, kernels.RECORD_BYTES)
            for slot in range(self.depth)
        ]
        if nbytes <= kernels.INLINE_BYTES:
            offset = BLOCK_BYTES + kernels.INLINE_AT
            self._slots = [
                memory.array(offset + slot * kernels.HEAD_BYTES, kernels.INLINE_BYTES) for slot in range(self.depth)
            ]
            self._end[kernels.DATA], self._end[kernels.STRIDE] = memory.address + offset, kernels.HEAD_BYTES
        else:
            self._lay_out(memory, _data_offset(self.depth), stride_of(nbytes))

    def _room(self) -> int:
        return len(self._slots[0])

    def _until(self, kernel: Any, on_wait: WaitHook) -> int:
        """Call a kernel until it returns something else than WAITING, and return that."""
        end, waits = self._end, 0
        end[_WAITING_FIELDS] = self._patient
        try:
            status: int = kernel(self.at)
            if status == kernels.WAITING:
                end[kernels.SPINS] = end[kernels.YIELDS] = 0  # a long wait must not burn the core
            while status == kernels.WAITING:
                on_wait()
                waits += 1
                if waits == _MANY_WAITS:
                    end[kernels.NAPS], end[kernels.NAP_MICROSECONDS] = _LONG_NAPS, _LONG_NAP_MICROSECONDS
                status = kernel(self.at)
        finally:
            end[_WAITING_FIELDS] = self._usual
        return status


def _data_offset(depth: int) -> int:
    return -(-(BLOCK_BYTES + depth * kernels.HEAD_BYTES) // _PAGE) * _PAGE


def inbox_bytes(depth: int, nbytes: int) -> int:
    """Return the size of an inbox: heads, and slots for so many bytes unless the heads have room for those."""
    return _data_offset(depth) + (0 if nbytes <= kernels.INLINE_BYTES else depth * stride_of(nbytes))


def ask_python(at: int) -> int:
    """Stand for a kernel where Python must do it."""
    return kernels.OTHER


def ask_python_too(at: int, array: int) -> int:
    """Stand for a kernel that takes an array."""
    return kernels.OTHER
