"""The sending end of a channel between nodes: `depth` messages in memory of their own, each a persistent request."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from commlib.buffers.views import address_of
from commlib.dtypes import Array
from commlib.errors import UsageError
from commlib.p2p.form import Shape
from commlib.p2p.posted import (
    DATA,
    GROW,
    GROWTH,
    HEAD_BYTES,
    KIND,
    LENGTHS,
    NBYTES,
    NDIM,
    NUMBER,
    TAIL,
    PostedEnd,
    Slot,
)
from commlib.transport.base import Request, WaitHook
from commlib.transport.polling import poll


class PostedSends(PostedEnd):
    """The sending end."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._next = 0
        self._owner = 0  # the thread that is in the middle of a send
        self.is_deferred = False
        self.may_lag = False
        """Whether a message may be under way, as far as was seen last."""
        self._announced: list[tuple[Request, Array]] = []
        self._passed: list[Slot] = []  # of an earlier length, perhaps under way
        self._lent: Array | None = None
        self._slots = [Slot(self._room, self._generation) for _ in range(self._depth)]

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
        self._write_head(slot.head, DATA, nbytes, x.shape)
        payload = slot.payload[:nbytes]
        if not self.form.is_plain or address_of(payload) != address_of(x):
            self.form.write(x, payload, self.count)
        length = HEAD_BYTES + nbytes
        if slot.length != length:  # persistent requests have a length of their own
            if slot.request is not None:
                slot.request.close()
            first = slot.memory[: min(length, self._longest)]
            slot.request = self._transport.persistent_send(self._peer, self._data_tag(), first)
            slot.length = length
        assert slot.request is not None
        slot.request.start()
        if length > self._longest:
            slot.tail = self._transport.send(self._peer, self._tag + TAIL, slot.memory[self._longest : length])
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
            slot.head[NUMBER] = self.count + 1
            slot.request.start()
            self.count += 1  # after that: the other side must not wait for what was never sent
            self._next = (self._next + 1) % self._depth
            self.shape = x.shape
            self.is_half_way = False
            self.may_lag = self.may_lag or not slot.request.test()
            return True

    def _write_head(self, head: Array, kind: int, nbytes: int, shape: Shape) -> None:
        head[NUMBER], head[KIND], head[NBYTES], head[NDIM] = self.count + 1, kind, nbytes, len(shape)
        head[LENGTHS : LENGTHS + len(shape)] = shape

    def _announce(self, nbytes: int) -> None:
        head = np.zeros(HEAD_BYTES // 8, np.int64)
        room = max(nbytes, int(GROWTH * self._room))
        self._write_head(head, GROW, room, ())
        self._announced.append((self._transport.send(self._peer, self._data_tag(), head.view(np.uint8).data), head))
        self._grow(room)
        self._passed += self._slots
        self._slots = [Slot(room, self._generation) for _ in range(self._depth)]
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
