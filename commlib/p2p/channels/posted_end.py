"""PostedEnd: the common base of both ends of a channel between nodes. Receives are posted before the sends.

Every message begins with a header: number, shape and length. So a message may be shorter than its posted receive.
Before a longer message the sender sends a header that announces it, and the receiver posts larger memory under the next
tag. So no message arrives at a receive that is too short. The part of a message beyond the limit of one request follows
under a separate tag for tails.

If a message has the shape of the previous one and the transport provides the functions, compiled code handles it alone
(`kernels.host.network_channel`). This module handles all other messages, and long waits.
"""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Any

import numpy as np

from commlib.buffers.views import address_of
from commlib.dtypes import Array
from commlib.kernels.fields import network_channel as kernels
from commlib.kernels.fields.channel import (
    COUNT,
    DEPTH,
    HALTED,
)
from commlib.kernels.fields.network_channel import (
    LENGTHS,
    WHAT,
)
from commlib.kernels.machine_code import entry_point
from commlib.p2p.channels.halt_flag import HaltFlag
from commlib.p2p.channels.node_end import ARRAYS_ARE_WHERE_EXPECTED
from commlib.p2p.channels.payload import PayloadFormat, Shape
from commlib.transport.base import PersistentMessage, Request, Transport

TAGS = 64
"""Tags of one direction: one for tails, and one for each size of its memory."""

# The least bytes of a slot, and the least factor of growth. With it the tags suffice for 10^14 bytes.
_LEAST_ROOM, GROWTH = 4096, 1.5

MOST_DIMENSIONS = kernels.MOST_DIMENSIONS  # of a sent array

DATA, GROW = 0, 1  # kinds of messages

LONGEST = 1 << 30  # bytes of one request

_POLLS = 200  # polls of a receiver before it runs the wait hook: about 100 us

TAIL = 0


def head_bytes(ndim: int) -> int:
    """Return the length of the header for an array of `ndim` dimensions."""
    return 8 * (LENGTHS + ndim)


class PostedSlot:
    """Memory of one message: its header, then its payload. row: its fields for compiled functions."""

    __slots__ = ("_all", "_request", "generation", "head", "length", "memory", "row", "shape", "tail", "view")

    def __init__(self, nbytes: int, ndim: int, generation: int, row: Array) -> None:
        """Make memory for payloads of up to `nbytes`, aligned to cache lines for `ndim`-dimensional arrays."""
        self.generation = generation  # the generation of the memory
        room = head_bytes(MOST_DIMENSIONS) + nbytes
        raw = np.empty(room + 63, np.uint8)
        self._all = raw[-(address_of(raw) + head_bytes(ndim)) % 64 :][:room]
        self.head = self._all[: head_bytes(MOST_DIMENSIONS)].view(np.int64)  # room for the largest header
        self.memory = self._all.data
        self.shape: Shape = ()
        self.view: Array | None = None  # of the last message in this slot
        self.length = -1  # bytes of the persistent send request
        self.tail: Request | None = None
        self._request: PersistentMessage | None = None
        self.row = row
        row[:] = 0
        row[kernels.HEAD], row[kernels.ROOM] = address_of(self._all), room

    def payload(self, ndim: int) -> Array:
        """Return the payload memory that follows the header of an `ndim`-dimensional array."""
        return self._all[head_bytes(ndim) :]

    @property
    def request(self) -> PersistentMessage | None:
        """The persistent request that sends from, or receives into, this slot."""
        return self._request

    @request.setter
    def request(self, request: PersistentMessage) -> None:
        self._request = request
        self.row[kernels.HANDLE] = request.handle_at

    def read(self, form: PayloadFormat, length: int) -> Array:
        """Return the received array."""
        shape, payload = self.shape_here(), self.payload(int(self.head[WHAT]))
        if self.view is None or shape != self.shape:
            self.view, self.shape = form.view(payload, shape), shape
        form.read(payload[:length], self.view)
        return self.view

    def shape_here(self) -> Shape:
        """Return the shape in the header."""
        return tuple(map(int, self.head[LENGTHS : LENGTHS + self.head[WHAT]]))

    def test(self) -> bool:
        """Make progress; return whether all requests of this slot are complete."""
        if self._request is not None and not self._request.test():
            return False
        return self.tail is None or self.tail.test()

    def close(self) -> None:
        if self._request is not None:
            self._request.close()
        if self.tail is not None and not self.tail.test():
            self.tail.cancel()


class PostedEnd:
    """One end: the fields that it shares with compiled functions, and its slots."""

    def __init__(
        self, transport: Transport, peer: int, form: PayloadFormat, shape: Shape, dtype: np.dtype[Any], depth: int
    ) -> None:
        self._transport, self._peer, self._depth, self._longest = transport, peer, depth, LONGEST
        self.form, self.shape, self._dtype = form, shape, dtype
        self._room, self._tag = max(form.nbytes(shape), _LEAST_ROOM), 0
        self._generation = 1
        self.is_half_way = False
        self._rows = np.zeros((depth, kernels.ROW_FIELDS), np.int64)
        self._end = end = np.zeros(kernels.POSTED_FIELDS, np.int64)
        self.at, self.flag = address_of(end), HaltFlag(end, halted=False)
        end[DEPTH], end[kernels.ROWS], end[kernels.POLLS] = depth, address_of(self._rows), _POLLS
        functions = transport.functions
        self._is_compiled = functions is not None and form.is_plain and ARRAYS_ARE_WHERE_EXPECTED
        if functions is not None:
            self._buffers = np.zeros(1, np.int32), np.zeros(functions.status_bytes, np.uint8)
            end[kernels.START], end[kernels.TEST] = functions.start, functions.test
            end[kernels.FLAG], end[kernels.STATUS] = (address_of(buffer) for buffer in self._buffers)
        # MPI allows one thread at a time to test a request. Reentrant, for calls from signal handlers.
        self.lock, self._turn = threading.RLock(), KernelLock(self.at)
        self._slots: list[PostedSlot] = []

    @property
    def count(self) -> int:
        """The number of messages that this end has sent or received."""
        return int(self._end[COUNT])

    def _data_tag(self) -> int:
        return self._tag + self._generation

    def _grow(self, room: int) -> None:
        self._room, self._generation = room, self._generation + 1

    def _make_slots(self) -> None:
        """Make new memory for `depth` messages."""
        self._rows[:] = 0
        self._slots = [PostedSlot(self._room, len(self.shape), self._generation, row) for row in self._rows]

    def close(self) -> None:
        with self.lock, self._turn:
            self._end[HALTED] = 1
            for slot in self._slots:
                slot.close()


_take_turn, _let_go = entry_point("network_channel.take_turn"), entry_point("channel.let_go")

_NAP = 20e-6  # seconds: about as long as a compiled function holds the lock


class KernelLock:
    """A lock between Python and compiled functions, in the fields of the end at an address.

    Only the holder of the end's Python lock takes it; signal handlers may take it again. If an exception interrupts
    this, compiled functions may leave the end to Python from then on, but no call hangs.
    """

    __slots__ = ("_at", "_depth")

    def __init__(self, at: int) -> None:
        self._at, self._depth = at, 0

    def __enter__(self) -> None:
        while not _take_turn(self._at):
            time.sleep(_NAP)
        self._depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._depth -= 1
        if self._depth <= 0:
            _let_go(self._at)
