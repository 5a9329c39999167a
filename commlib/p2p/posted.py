"""The two ends of a channel's direction between nodes: messages in persistent requests, received before they are sent.

Every message begins with a head that says its number, its shape and its length, so what comes may always be shorter
than the memory that was posted for it. A longer one is announced by a head of its own: the receiver then posts more
memory, under the next tag, so that no message can meet memory that is too short for it. What one request cannot hold
follows under a tag for such tails.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from commlib.buffers.views import address_of
from commlib.dtypes import Array
from commlib.errors import TransportError, UsageError
from commlib.p2p.form import Form, Shape
from commlib.runtime.polling import poll
from commlib.transport.base import PersistentMessage, Request, Transport, WaitHook

TAGS = 64
"""How many tags a direction has: for tails, and for every time that its memory has grown."""

_LEAST_ROOM, _GROWTH = (
    4096,
    1.5,
)  # bytes, and by how much memory grows at least: so there are tags enough for 10^14 bytes

MOST_DIMENSIONS = 12
_NUMBER, _KIND, _NBYTES, _NDIM, _LENGTHS = range(5)
_HEAD_BYTES = 8 * (_LENGTHS + MOST_DIMENSIONS)
_DATA, _GROW = 0, 1

LONGEST = 1 << 30  # bytes of one request

_EAGER = 50  # how often a receiver asks before it looks around

_TAIL = 0


class _Slot:
    """Memory of one message: its head, then its payload."""

    __slots__ = ("_all", "generation", "head", "length", "memory", "payload", "request", "shape", "tail", "view")

    def __init__(self, nbytes: int, generation: int) -> None:
        self.generation = generation  # how often memory has grown before
        raw = np.empty(_HEAD_BYTES + nbytes + 63, np.uint8)
        self._all = raw[-address_of(raw) % 64 :][: _HEAD_BYTES + nbytes]
        self.head = self._all[:_HEAD_BYTES].view(np.int64)
        self.payload = self._all[_HEAD_BYTES:]
        self.memory = self._all.data
        self.shape: Shape = ()
        self.view: Array | None = None  # of the last message that was here, as an array
        self.length = -1  # bytes that `request` is for; of what is received, of the payload, once that is known
        self.request: PersistentMessage | None = None
        self.tail: Request | None = None

    def read(self, form: Form, length: int) -> Array:
        """Return what has come as an array."""
        shape = tuple(map(int, self.head[_LENGTHS : _LENGTHS + self.head[_NDIM]]))
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


@dataclass(frozen=True, slots=True, eq=False)
class _Held:
    """A message that was received and not handed back."""

    view: Array
    slot: _Slot


class _End:
    def __init__(
        self, transport: Transport, peer: int, form: Form, shape: Shape, depth: int, longest: int = LONGEST
    ) -> None:
        self._transport, self._peer, self._depth, self._longest = transport, peer, depth, longest
        self.form, self.shape, self.count = form, shape, 0
        self._room, self._tag = max(form.nbytes(shape), _LEAST_ROOM), 0
        self._generation = 1
        # MPI allows one thread at a time to ask for a request; a signal handler's call may find its own thread here.
        self.lock = threading.RLock()
        self.is_half_way = False
        self._slots: list[_Slot] = []
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


class PostedReceives(_End):
    """The receiving end."""

    def __init__(self, *args: Any, tag: int, **options: Any) -> None:
        super().__init__(*args, **options)
        self._tag = tag
        self._posted: deque[_Slot] = deque()  # in the order in which messages will take them
        self._held: list[_Held] = []  # the oldest first
        self.views: list[Array] = []
        self._post_all()

    is_settled = True
    """Whether the other side needs nothing more of this one."""

    def connect(self) -> None:
        """Begin: the receives are there already."""

    def _post_all(self) -> None:
        self._slots = [_Slot(self._room, self._generation) for _ in range(self._depth)]
        for slot in self._slots:
            head = slot.memory[: self._longest]
            slot.request = self._transport.persistent_recv(self._peer, self._data_tag(), head)
            self._post(slot)

    def _post(self, slot: _Slot) -> None:
        slot.tail = None
        slot.length = -1
        assert slot.request is not None
        slot.request.start()
        self._posted.append(slot)

    @staticmethod
    def take(at: int) -> int:
        return -3  # kernels.OTHER: ask `recv`

    @staticmethod
    def hand_back(at: int, array: int) -> int:
        return -3

    def has_come(self) -> bool:
        """Make progress; return whether the next message is there."""
        with self.lock:
            while not self._halted and self._posted:
                slot = self._posted[0]
                assert slot.request is not None
                if not slot.request.test():
                    return False
                if slot.length < 0:
                    self._read_head(slot)
                    continue
                return slot.tail is None or slot.tail.test()
            return False

    def _read_head(self, slot: _Slot) -> None:
        head = slot.head
        if head[_NUMBER] != self.count + 1:
            raise TransportError(
                f"a channel from rank {self._peer}: message {self.count + 1} was expected, number {head[_NUMBER]} came"
            )
        length = int(head[_NBYTES])
        self.is_half_way = True
        if head[_KIND] == _GROW:
            old = list(self._posted)
            self._grow(length)
            self._posted.clear()
            self._post_all()
            for passed in old:  # nothing more comes under their tag
                passed.close()
            self.is_half_way = False
            return
        if _HEAD_BYTES + length > self._longest:
            rest = slot.memory[self._longest : _HEAD_BYTES + length]
            slot.tail = self._transport.recv(self._peer, self._tag + _TAIL, rest)
        slot.length = length
        self.is_half_way = False

    def recv(self, text: str, on_wait: WaitHook) -> Array | None:
        """Take the next message and return its view; None if the end is halted.

        Raises UsageError if the memory of all is held.
        """
        while not self._halted:
            poll(lambda: self.has_come() or not self._posted or self._halted, on_wait)
            with self.lock:
                if self.has_come():
                    return self._take()
                if not self._posted and not self._halted:
                    raise UsageError(
                        f"{text}: all {self._depth} messages that fit in have been received and none handed back: call "
                        "release, or open the channel with a greater depth"
                    )
        return None

    def _take(self) -> Array:
        self.is_half_way = True
        slot = self._posted.popleft()
        self.count += 1
        view = slot.read(self.form, slot.length)
        self._held.append(_Held(view, slot))
        self.is_half_way = False
        return view

    def try_take(self) -> Array | None:
        """Take the next message if it comes at once; None if not, or if there is anything unusual about it."""
        with self.lock:
            if not self._halted and self._posted and (request := self._posted[0].request) is not None:
                for _ in range(_EAGER):
                    if request.test():
                        return self._take() if self.has_come() else None
            return None

    def release(self, view: Array | None) -> bool:
        """Post the memory of a view anew, or of all that have been received; False if the view is none of them."""
        with self.lock:
            self.is_half_way = True
            if view is None:
                chosen, self._held = self._held, []
            else:
                chosen = [pair for pair in self._held if _is_in(view, pair)][:1]
                self._held = [pair for pair in self._held if pair not in chosen]
            for pair in chosen:
                if not self._halted and pair.slot.generation == self._generation:
                    self._post(pair.slot)
            self.is_half_way = False
            return bool(chosen) or view is None


def _is_in(view: Array, held: _Held) -> bool:
    known = held.view
    return view is known or bool(np.may_share_memory(view, known) or np.may_share_memory(view, held.slot.payload))


class PostedSends(_End):
    """The sending end."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._next = 0
        self._owner = 0  # the thread that is in the middle of a send
        self.is_deferred = False
        self.may_lag = False
        """Whether a message may be under way, as far as was seen last."""
        self._announced: list[tuple[Request, Array]] = []
        self._passed: list[_Slot] = []  # of an earlier length, perhaps under way
        self._lent: Array | None = None
        self._slots = [_Slot(self._room, self._generation) for _ in range(self._depth)]

    @property
    def is_settled(self) -> bool:
        """Whether the other side needs nothing more of this one."""
        return not self.is_under_way

    def connect(self, tag: int) -> None:
        """Send under the tags that begin with `tag`."""
        self._tag = tag

    lent: Sequence[Array] = ()

    @staticmethod
    def free_slot(at: int) -> int:
        return -3

    @staticmethod
    def put(at: int, array: int) -> int:
        return -3

    def has_room(self) -> bool:
        """Make progress; return whether the next message need not wait."""
        with self.lock:
            return self._slots[self._next].test()

    @property
    def is_under_way(self) -> bool:
        """Make progress; return whether any message is under way."""
        if not self.lock.acquire(blocking=False):  # whoever holds it asks itself, or was interrupted for good
            return self.may_lag
        try:
            self._passed = [slot for slot in self._passed if not slot.test()]
            self._announced = [pair for pair in self._announced if not pair[0].test()]
            self.may_lag = bool(self._passed or self._announced) or not all(slot.test() for slot in self._slots)
            return self.may_lag
        finally:
            self.lock.release()

    def send(self, x: Array, text: str, on_wait: WaitHook) -> None:
        """Send a contiguous array of the dtype, of any shape."""
        if self._owner == threading.get_ident():
            raise UsageError(f"{text}: called in the middle of another send of the same channel, by a signal handler?")
        while not self._halted:
            poll(lambda: self.has_room() or self._halted, on_wait)
            with self.lock:
                if self.has_room() and not self._halted:
                    self._start(x)
                    return
        on_wait()  # says why

    def _start(self, x: Array) -> None:
        self._owner, self.is_half_way = threading.get_ident(), True
        nbytes = self.form.nbytes(x.shape)
        if nbytes > self._room:
            self._announce(nbytes)
        slot = self._slots[self._next]
        slot.tail = None
        self._write_head(slot.head, _DATA, nbytes, x.shape)
        payload = slot.payload[:nbytes]
        if not self.form.is_plain or address_of(payload) != address_of(x):
            self.form.write(x, payload, self.count)
        length = _HEAD_BYTES + nbytes
        if slot.length != length:  # persistent requests have a length of their own
            if slot.request is not None:
                slot.request.close()
            first = slot.memory[: min(length, self._longest)]
            slot.request = self._transport.persistent_send(self._peer, self._data_tag(), first)
            slot.length = length
        assert slot.request is not None
        slot.request.start()
        if length > self._longest:
            slot.tail = self._transport.send(self._peer, self._tag + _TAIL, slot.memory[self._longest : length])
        self.may_lag = True
        slot.shape, slot.view = x.shape, self.form.view(slot.payload, x.shape) if self.form.is_plain else None
        self.count += 1
        self._next = (self._next + 1) % self._depth
        self.shape = x.shape
        self._owner, self.is_half_way = 0, False

    def try_put(self, x: Any) -> bool:
        """Send an array like the last one, if there is room at once; else return False, and have done nothing."""
        slot = self._slots[self._next]
        if type(x) is not np.ndarray or x.shape != slot.shape or not x.flags.c_contiguous or slot.view is None:
            return False
        if x.dtype != slot.view.dtype or not self.form.is_plain:
            return False
        with self.lock:
            if self._halted or self.is_deferred or self.is_half_way or slot.tail is not None:
                return False
            if slot.request is None or slot is not self._slots[self._next] or not slot.request.test():
                return False
            self.is_half_way = True
            if x is not slot.view:
                slot.view[...] = x
            slot.head[_NUMBER] = self.count + 1
            slot.request.start()
            self.count += 1  # after that: the other side must not wait for what was never sent
            self._next = (self._next + 1) % self._depth
            self.shape = x.shape
            self.is_half_way = False
            self.may_lag = self.may_lag or not slot.request.test()
            return True

    def _write_head(self, head: Array, kind: int, nbytes: int, shape: Shape) -> None:
        head[_NUMBER], head[_KIND], head[_NBYTES], head[_NDIM] = self.count + 1, kind, nbytes, len(shape)
        head[_LENGTHS : _LENGTHS + len(shape)] = shape

    def _announce(self, nbytes: int) -> None:
        head = np.zeros(_HEAD_BYTES // 8, np.int64)
        room = max(nbytes, int(_GROWTH * self._room))
        self._write_head(head, _GROW, room, ())
        self._announced.append((self._transport.send(self._peer, self._data_tag(), head.view(np.uint8).data), head))
        self._grow(room)
        self._passed += self._slots
        self._slots = [_Slot(room, self._generation) for _ in range(self._depth)]
        self._next = 0

    def buffer(self, shape: Shape, on_wait: WaitHook) -> Array:
        """Return an array that `send` need not copy, if it is not longer than those before."""
        if not self.form.is_plain or self.form.nbytes(shape) > self._room:
            return self.form.view(np.empty(self.form.nbytes(shape), np.uint8), shape)
        poll(lambda: self.has_room() or self._halted, on_wait)
        slot = self._slots[self._next]
        if slot.view is None or slot.shape != shape:
            return self.form.view(slot.payload, shape)
        return slot.view

    def defer(self, *, yes: bool) -> None:
        """Let `try_put` send nothing, because other messages must go first; or no more."""
        self.is_deferred = yes

    def close(self) -> None:
        with self.lock:
            super().close()
            for slot in self._passed:
                slot.close()
            for request, _ in self._announced:
                if not request.test():
                    request.cancel()
