"""PostedEnd: hold what both ends of a channel share between nodes. Receives are posted before messages are sent.

Every message begins with a head that says its number, its shape and its length. So a message may always be shorter than
the memory that was posted for it. A longer message is announced by a head of its own: the receiver then posts more
memory, under the next tag. So no message can meet memory that is too short. The rest that one request cannot hold
follows under a tag for such tails.

A message like the one before goes by compiled functions alone (`kernels.host.posted`), where the transport has what
they call; all others, and long waits, are here.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from commlib.buffers.views import address_of
from commlib.dtypes import Array
from commlib.kernels.host import posted as kernels
from commlib.kernels.host.channel import COUNT, DEPTH, HALTED
from commlib.kernels.host.posted import LENGTHS, WHAT
from commlib.p2p.channels.node_end import ARRAYS_ARE_WHERE_EXPECTED
from commlib.p2p.channels.payload import Form, Shape
from commlib.p2p.channels.turn import Turn
from commlib.transport.base import PersistentMessage, Request, Transport

TAGS = 64
"""How many tags a direction has: for tails, and for every time that its memory has grown."""

# Bytes, and by how much memory grows at least: so there are tags enough for 10^14 bytes.
_LEAST_ROOM, GROWTH = 4096, 1.5

MOST_DIMENSIONS = kernels.MOST_DIMENSIONS  # of an array that is sent

DATA, GROW = 0, 1  # kinds of messages

LONGEST = 1 << 30  # bytes of one request

_POLLS = 200  # how often a receiver asks before it looks around: some 100 us

TAIL = 0


def head_bytes(ndim: int) -> int:
    """Return the length of the head of an array's message."""
    return 8 * (LENGTHS + ndim)


class Slot:
    """Memory of one message: its head, then its payload. `row` is what compiled functions know of it."""

    __slots__ = ("_all", "_request", "generation", "head", "length", "memory", "row", "shape", "tail", "view")

    def __init__(self, nbytes: int, ndim: int, generation: int, row: Array) -> None:
        """For payloads of up to `nbytes`. Those of arrays of `ndim` dimensions are aligned as caches are."""
        self.generation = generation  # how often memory has grown before
        room = head_bytes(MOST_DIMENSIONS) + nbytes
        raw = np.empty(room + 63, np.uint8)
        self._all = raw[-(address_of(raw) + head_bytes(ndim)) % 64 :][:room]
        self.head = self._all[: head_bytes(MOST_DIMENSIONS)].view(np.int64)  # as much as there may be of it
        self.memory = self._all.data
        self.shape: Shape = ()
        self.view: Array | None = None  # of the last message that was here, as an array
        self.length = -1  # bytes that the request of a send is for
        self.tail: Request | None = None
        self._request: PersistentMessage | None = None
        self.row = row
        row[:] = 0
        row[kernels.HEAD], row[kernels.ROOM] = address_of(self._all), room

    def payload(self, ndim: int) -> Array:
        """Return the memory of the payload behind the head of an array of so many dimensions."""
        return self._all[head_bytes(ndim) :]

    @property
    def request(self) -> PersistentMessage | None:
        """The message that is sent from here, or received, again and again."""
        return self._request

    @request.setter
    def request(self, request: PersistentMessage) -> None:
        self._request = request
        self.row[kernels.HANDLE] = request.handle_at

    def read(self, form: Form, length: int) -> Array:
        """Return what has come as an array."""
        shape, payload = self.shape_here(), self.payload(int(self.head[WHAT]))
        if self.view is None or shape != self.shape:
            self.view, self.shape = form.view(payload, shape), shape
        form.read(payload[:length], self.view)
        return self.view

    def shape_here(self) -> Shape:
        """Return the shape that an array's head says."""
        return tuple(map(int, self.head[LENGTHS : LENGTHS + self.head[WHAT]]))

    def test(self) -> bool:
        """Make progress; return whether nothing of it is under way."""
        if self._request is not None and not self._request.test():
            return False
        return self.tail is None or self.tail.test()

    def close(self) -> None:
        if self._request is not None:
            self._request.close()
        if self.tail is not None and not self.tail.test():
            self.tail.cancel()


class PostedEnd:
    """Hold what both ends have: the numbers that compiled functions share with Python, and slots."""

    def __init__(
        self, transport: Transport, peer: int, form: Form, shape: Shape, dtype: np.dtype[Any], depth: int
    ) -> None:
        self._transport, self._peer, self._depth, self._longest = transport, peer, depth, LONGEST
        self.form, self.shape, self._dtype = form, shape, dtype
        self._room, self._tag = max(form.nbytes(shape), _LEAST_ROOM), 0
        self._generation = 1
        self.is_half_way = self._halted = self._is_deferred = False
        self._rows = np.zeros((depth, kernels.ROW_FIELDS), np.int64)
        self._end = end = np.zeros(kernels.POSTED_FIELDS, np.int64)
        self.at = address_of(end)
        end[DEPTH], end[kernels.ROWS], end[kernels.POLLS] = depth, address_of(self._rows), _POLLS
        functions = transport.functions
        self._is_compiled = functions is not None and form.is_plain and ARRAYS_ARE_WHERE_EXPECTED
        if functions is not None:
            self._flag, self._status = np.zeros(1, np.int32), np.zeros(functions.status_bytes, np.uint8)
            end[kernels.START], end[kernels.TEST] = functions.start, functions.test
            end[kernels.FLAG], end[kernels.STATUS] = address_of(self._flag), address_of(self._status)
        # MPI allows one thread at a time to ask for a request; a signal handler's call may find its own thread here.
        self.lock, self._turn = threading.RLock(), Turn(self.at)
        self._slots: list[Slot] = []

    @property
    def count(self) -> int:
        """How many messages this end has sent, or received."""
        return int(self._end[COUNT])

    def halt(self, *, yes: bool) -> None:
        """Let nothing move any more, or again."""
        self._halted = yes
        self._end[HALTED] = yes or self._is_deferred

    def defer(self, *, yes: bool) -> None:
        """Let compiled functions move nothing, because other messages must go first; or no more."""
        self._is_deferred = yes
        self._end[HALTED] = yes or self._halted

    def _data_tag(self) -> int:
        return self._tag + self._generation

    def _grow(self, room: int) -> None:
        self._room, self._generation = room, self._generation + 1

    def _make_slots(self) -> None:
        """Make memory for `depth` messages, in place of what there was."""
        self._rows[:] = 0
        self._slots = [Slot(self._room, len(self.shape), self._generation, row) for row in self._rows]

    def close(self) -> None:
        with self.lock, self._turn:
            self._end[HALTED] = 1
            for slot in self._slots:
                slot.close()
