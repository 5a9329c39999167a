"""The two ends of a channel's direction between nodes: messages in persistent requests, received before they are sent.

Every message begins with a head that says its number, its shape and its length, so what comes may always be shorter
than the memory that was posted for it. A longer one is announced by a head of its own: the receiver then posts more
memory, under the next tag, so that no message can meet memory that is too short for it. What one request cannot hold
follows under a tag for such tails.
"""

from __future__ import annotations

import threading

import numpy as np

from commlib.buffers.views import address_of
from commlib.dtypes import Array
from commlib.p2p.form import Form, Shape
from commlib.transport.base import PersistentMessage, Request, Transport

TAGS = 64
"""How many tags a direction has: for tails, and for every time that its memory has grown."""

_LEAST_ROOM, GROWTH = (
    4096,
    1.5,
)  # bytes, and by how much memory grows at least: so there are tags enough for 10^14 bytes

MOST_DIMENSIONS = 12
NUMBER, KIND, NBYTES, NDIM, LENGTHS = range(5)
HEAD_BYTES = 8 * (LENGTHS + MOST_DIMENSIONS)
DATA, GROW = 0, 1

LONGEST = 1 << 30  # bytes of one request

EAGER = 50  # how often a receiver asks before it looks around

TAIL = 0


class Slot:
    """Memory of one message: its head, then its payload."""

    __slots__ = ("_all", "generation", "head", "length", "memory", "payload", "request", "shape", "tail", "view")

    def __init__(self, nbytes: int, generation: int) -> None:
        self.generation = generation  # how often memory has grown before
        raw = np.empty(HEAD_BYTES + nbytes + 63, np.uint8)
        self._all = raw[-address_of(raw) % 64 :][: HEAD_BYTES + nbytes]
        self.head = self._all[:HEAD_BYTES].view(np.int64)
        self.payload = self._all[HEAD_BYTES:]
        self.memory = self._all.data
        self.shape: Shape = ()
        self.view: Array | None = None  # of the last message that was here, as an array
        self.length = -1  # bytes that `request` is for; of what is received, of the payload, once that is known
        self.request: PersistentMessage | None = None
        self.tail: Request | None = None

    def read(self, form: Form, length: int) -> Array:
        """Return what has come as an array."""
        shape = tuple(map(int, self.head[LENGTHS : LENGTHS + self.head[NDIM]]))
        if self.view is None or shape != self.shape:
            self.view, self.shape = form.view(self.payload, shape), shape
        form.read(self.payload[:length], self.view)
        return self.view

    def test(self) -> bool:
        """Make progress; return whether nothing of it is under way."""
        if self.request is not None and not self.request.test():
            return False
        return self.tail is None or self.tail.test()

    def close(self) -> None:
        if self.request is not None:
            self.request.close()
        if self.tail is not None and not self.tail.test():
            self.tail.cancel()


class PostedEnd:
    def __init__(self, transport: Transport, peer: int, form: Form, shape: Shape, depth: int) -> None:
        self._transport, self._peer, self._depth, self._longest = transport, peer, depth, LONGEST
        self.form, self.shape, self.count = form, shape, 0
        self._room, self._tag = max(form.nbytes(shape), _LEAST_ROOM), 0
        self._generation = 1
        # MPI allows one thread at a time to ask for a request; a signal handler's call may find its own thread here.
        self.lock = threading.RLock()
        self.is_half_way = False
        self._slots: list[Slot] = []
        self._halted = False

    at = 0  # there is no compiled end

    def halt(self, *, yes: bool) -> None:
        """Let nothing move any more, or again."""
        self._halted = yes

    def _data_tag(self) -> int:
        return self._tag + self._generation

    def _grow(self, room: int) -> None:
        self._room, self._generation = room, self._generation + 1

    def close(self) -> None:
        with self.lock:
            for slot in self._slots:
                slot.close()
