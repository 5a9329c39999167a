"""Outbox: the sending end of a channel on one node. It writes into the other rank's inbox."""

from __future__ import annotations

import json
import threading
from typing import Any

import numpy as np

from commlib.buffers.peer_memory import MemoryPlace, PeerMapping, PeerMemory
from commlib.buffers.views import address_of
from commlib.dtypes import Array
from commlib.errors import UsageError
from commlib.kernels.host import channel as kernels
from commlib.kernels.host.node import entry_point
from commlib.p2p.channels.node_end import (
    ARRAYS_ARE_WHERE_EXPECTED,
    BLOCK_BYTES,
    GROWTH,
    MAPPED_BY_RECEIVER,
    MAPPED_BY_SENDER,
    NodeEnd,
    defer_array_to_python,
    defer_to_python,
    stride_of,
)
from commlib.p2p.channels.payload import PayloadFormat, Shape
from commlib.transport.base import WaitHook

_put, _free_slot = entry_point(kernels.put, 2), entry_point(kernels.free_slot)
_reserve, _put_reserved, _let_go = (
    entry_point(kernels.reserve),
    entry_point(kernels.put_reserved, 2),
    entry_point(kernels.let_go),
)


class Outbox(NodeEnd):
    """The sending end of a channel."""

    def __init__(
        self, form: PayloadFormat, shape: Shape, dtype: np.dtype[Any], depth: int, spins: int, *, is_named: bool
    ) -> None:
        super().__init__(form, shape, dtype, depth, spins)
        self._is_named = is_named
        self._larger: dict[int, PeerMemory] = {}  # memory for messages that are too long for the inbox, by number
        self._created = 0  # how many of these were made
        self._owner = 0  # the thread that has reserved a slot
        self.put = _put if form.is_plain and ARRAYS_ARE_WHERE_EXPECTED else defer_array_to_python
        self.buffers: list[Array] = []
        """For each slot, the array in which `buffer` lets the user write the next message."""
        self.free_slot = _free_slot if form.is_plain else defer_to_python
        self._agree(shape)

    def connect(self, place: MemoryPlace) -> None:
        """Map the receiver's inbox. Raises OSError."""
        memory = PeerMapping(place)
        self._lay_out_inbox(memory, self.form.nbytes(self.shape))
        self._agree(self.shape)
        self._back = [
            memory.array(BLOCK_BYTES + slot * kernels.HEAD_BYTES + kernels.BACK_AT, 8).view(np.int64)
            for slot in range(self.depth)
        ]
        self._block[MAPPED_BY_SENDER] = 1
        self._end[kernels.SPEC] = 1

    def _agree(self, shape: Shape) -> None:
        """Prepare `put` for arrays of this shape."""
        self.shape, self._lengths = shape, np.array(shape or (0,), np.int64)
        self._end[kernels.DESCR], self._end[kernels.NDIM] = id(self._dtype), len(shape)
        self._end[kernels.SHAPE], self._end[kernels.NBYTES] = self._lengths.ctypes.data, self.form.nbytes(shape)
        if self.form.is_plain:
            self.buffers[:] = [self.form.view(slot, shape) for slot in self._slots]

    def has_room(self) -> bool:
        """Return whether the next message can be sent without waiting."""
        back = self._back[int(self._end[kernels.SLOT])]
        return int(back[0]) > self.count - self.depth

    def send(self, x: Array, text: str, on_wait: WaitHook) -> None:
        """Send a contiguous array of the dtype, of any shape."""
        thread = threading.get_ident()
        if self._owner == thread:
            raise UsageError(
                f"{text}: called during another send on the same channel, in the same thread, perhaps by a signal "
                "handler: let the handler set a flag, and send after the other call has returned"
            )
        slot = self._until(_reserve, on_wait)
        self._owner = thread
        if x.shape != self.shape:
            self._announce(slot, x.shape)
        if self.form.is_plain:
            _put_reserved(self.at, address_of(x))
        else:
            payload = self._slots[slot]
            self.form.write(x, payload[: self.form.nbytes(x.shape)], self.count)
            _put_reserved(self.at, address_of(payload))
        self._owner = 0

    @property
    def is_half_way(self) -> bool:
        """Whether a send was interrupted between two steps: a slot may stay reserved forever."""
        return self._owner != 0 or bool(self._end[kernels.BUSY])

    def _announce(self, slot: int, shape: Shape) -> None:
        nbytes, larger = self.form.nbytes(shape), None
        if nbytes > self._room():
            self.tidy()
            stride = stride_of(max(nbytes, int(GROWTH * self._room())))
            larger = self._larger[self._created] = PeerMemory(self.depth * stride, is_named=self._is_named)
            self._created += 1
        text = json.dumps({"shape": shape, "memory": larger and larger.place}).encode()
        self._records[slot][: len(text) + 1] = np.frombuffer(text + b"\0", np.uint8)
        if larger is not None:
            self._lay_out(larger.memory, 0, larger.place[2] // self.depth)
        self._agree(shape)
        self._end[kernels.SPEC] += 1

    def buffer(self, shape: Shape, on_wait: WaitHook) -> Array:
        """Return an array that `send` need not copy: the next free slot, if the shape fits into it."""
        if not self.form.is_plain or self.form.nbytes(shape) > self._room():
            return np.empty(shape, self._dtype)
        slot = self._until(_reserve, on_wait)
        _let_go(self.at)
        return self.buffers[slot] if shape == self.shape else self.form.view(self._slots[slot], shape)

    @property
    def is_settled(self) -> bool:
        """Whether the other side needs no more memory from this side: it has mapped the memory of all messages."""
        self.tidy()
        return not self._larger

    @property
    def may_lag(self) -> bool:
        """Whether `is_in_flight` may be true."""
        return bool(self._larger)

    @property
    def is_in_flight(self) -> bool:
        """Whether the receiver has not yet mapped the memory of some message."""
        return not self.is_settled

    def tidy(self) -> None:
        """Withdraw memory that the receiver has mapped. The poller may do the same at the same time."""
        self._withdraw([number for number in list(self._larger) if number < self._block[MAPPED_BY_RECEIVER]])

    def _withdraw(self, numbers: list[int]) -> None:
        for number in numbers:
            if (memory := self._larger.pop(number, None)) is not None:
                memory.withdraw()

    def close(self) -> None:
        """Free the memory, even of messages that the receiver has not mapped."""
        self.flag.halt(yes=True)
        self._withdraw(list(self._larger))
