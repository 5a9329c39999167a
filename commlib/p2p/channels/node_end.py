"""NodeEnd: the common base of the sending and the receiving end of a channel on one node. Both use the same inbox.

`kernels.host.channel` is the compiled part. This module handles the memory, changes of shape, and long waits.

The receiver makes the inbox when it opens the channel. For a message that is too long for the slots, the sender makes
larger memory and describes it in the slot's header. So the sender never waits for the receiver to make room.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from commlib.buffers.peer_memory import PeerMapping
from commlib.dtypes import Array
from commlib.kernels.host import arrays
from commlib.kernels.host import channel as kernels
from commlib.p2p.channels.halt_flag import HaltFlag
from commlib.p2p.channels.payload import PayloadFormat, Shape
from commlib.transport.base import WaitHook
from commlib.transport.naps import kernel_naps

# How long one kernel call waits before it returns to Python to run the wait hook: spins, these yields, then naps.
_YIELDS = 2000
_WAITING_FIELDS = [kernels.SPINS, kernels.YIELDS, kernels.NAPS, kernels.NAP_MICROSECONDS]

# Longer messages are written past the caches, which two slots and their sources would fill.
_STREAMED_BYTES = 8 << 20

_ALIGNMENT, _PAGE = 128, 4096
GROWTH = 1.5  # the least factor by which slots grow, so they rarely grow
BLOCK_BYTES = 128  # before the headers: int64 counts of the peer's memories that each side has mapped
MAPPED_BY_SENDER, MAPPED_BY_RECEIVER = 0, 8

ARRAYS_ARE_WHERE_EXPECTED = arrays.are_where_expected()


def waiting_fields(spins: int) -> tuple[int, int, int, int]:
    """Return how long one kernel call waits: polls, yields, naps, and microseconds of each nap."""
    return spins, _YIELDS, *kernel_naps(0)


def _only_polls(spins: int) -> tuple[int, int, int, int]:
    """Return the same without yields and naps, so that Python soon notices a signal handler's exception."""
    return spins, 0, 0, kernel_naps(0)[1]


def stride_of(nbytes: int) -> int:
    return max(_ALIGNMENT, -(-nbytes // _ALIGNMENT) * _ALIGNMENT)


class NodeEnd:
    """One end: the fields that it shares with the kernels, and the slots' memory."""

    def __init__(self, form: PayloadFormat, shape: Shape, dtype: np.dtype[Any], depth: int, spins: int) -> None:
        self.form, self.shape, self._dtype, self.depth = form, shape, dtype, depth
        self._end = np.zeros(kernels.END_FIELDS, np.int64)
        self.at: int = self._end.ctypes.data
        self._end[kernels.DEPTH] = depth
        self._end[_WAITING_FIELDS] = self._usual = _only_polls(spins)
        self._patient = waiting_fields(spins)
        self._end[kernels.STREAMED] = _STREAMED_BYTES
        self.flag = HaltFlag(self._end, halted=True)  # until both ends are connected
        self._memory: PeerMapping | None = None  # of the headers
        self._slots: list[Array] = []

    @property
    def count(self) -> int:
        """The number of messages that this end has sent or received."""
        return int(self._end[kernels.COUNT])

    def _lay_out(self, memory: PeerMapping, offset: int, stride: int, heads: int | None = None) -> None:
        """Place the slots in `memory`, starting at `offset`."""
        self._slots = [memory.array(offset + slot * stride, stride) for slot in range(self.depth)]
        self._end[kernels.DATA], self._end[kernels.STRIDE] = memory.address + offset, stride

    def _lay_out_inbox(self, memory: PeerMapping, nbytes: int) -> None:
        """Place headers and slots in an inbox of `inbox_bytes`."""
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
        """Call a kernel until its status is not WAITING; return the status."""
        end = self._end
        end[_WAITING_FIELDS] = self._patient
        try:
            status: int = kernel(self.at)
            if status == kernels.WAITING:
                end[kernels.SPINS] = end[kernels.YIELDS] = 0  # a long wait must not burn the core
                start = time.monotonic()
            while status == kernels.WAITING:
                on_wait()
                end[kernels.NAPS], end[kernels.NAP_MICROSECONDS] = kernel_naps(time.monotonic() - start)
                status = kernel(self.at)
        finally:
            end[_WAITING_FIELDS] = self._usual
        return status


def _data_offset(depth: int) -> int:
    return -(-(BLOCK_BYTES + depth * kernels.HEAD_BYTES) // _PAGE) * _PAGE


def inbox_bytes(depth: int, nbytes: int) -> int:
    """Return the size of an inbox: headers, and slots of `nbytes` unless these fit into the headers."""
    return _data_offset(depth) + (0 if nbytes <= kernels.INLINE_BYTES else depth * stride_of(nbytes))


def defer_to_python(at: int) -> int:
    """Replace a kernel where Python must handle the call."""
    return kernels.OTHER


def defer_array_to_python(at: int, array: int) -> int:
    """Replace a kernel that takes an array."""
    return kernels.OTHER
