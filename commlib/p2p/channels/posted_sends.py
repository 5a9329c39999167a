"""PostedSends: the sending end of a channel between nodes. Each of its `depth` slots has a persistent request."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from commlib.buffers.views import address_of
from commlib.dtypes import Array
from commlib.errors import UsageError
from commlib.kernels.host import network_channel as kernels
from commlib.kernels.host.channel import COUNT, DESCR, NBYTES, NDIM, SHAPE, SLOT, SPEC
from commlib.kernels.host.network_channel import KIND, LENGTHS, NUMBER, WHAT
from commlib.kernels.host.node import entry_point
from commlib.p2p.channels.node_end import defer_array_to_python, defer_to_python
from commlib.p2p.channels.payload import Shape
from commlib.p2p.channels.posted_end import DATA, GROW, GROWTH, TAIL, PostedEnd, PostedSlot, head_bytes
from commlib.transport.base import Request, WaitHook
from commlib.transport.polling import poll

_put, _free_slot = entry_point(kernels.put, 2), entry_point(kernels.free_slot)


class PostedSends(PostedEnd):
    """The sending end of a channel between nodes."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._owner = 0  # the thread that is sending
        self.may_lag = False
        """Whether a message may be in flight, as of the last poll."""
        self._announced: list[tuple[Request, Array]] = []
        self._passed: list[PostedSlot] = []  # slots of an earlier size, perhaps still sending
        self.buffers: list[Array] = []
        """For each slot, the array in which `buffer` lets the user write the next message."""
        self.put = _put if self._is_compiled else defer_array_to_python
        self.free_slot = _free_slot if self._is_compiled else defer_to_python
        self._make_slots()
        self._agree(self.shape)

    def _make_slots(self) -> None:
        super()._make_slots()
        self.buffers[:] = [slot.payload(0) for slot in self._slots]

    def _agree(self, shape: Shape) -> None:
        """Prepare `put` for arrays of this shape."""
        self.shape, self._lengths = shape, np.array(shape or (0,), np.int64)
        self._end[DESCR], self._end[NDIM] = id(self._dtype), len(shape)
        self._end[SHAPE], self._end[NBYTES] = address_of(self._lengths), self.form.nbytes(shape)
        self._end[SPEC] += 1

    @property
    def is_settled(self) -> bool:
        """Whether the other side needs no more from this side."""
        return not self.is_in_flight

    def connect(self, tag: int) -> None:
        """Connect; send under the tags that begin with `tag`."""
        self._tag = tag

    def _next(self) -> PostedSlot:
        return self._slots[int(self._end[SLOT])]

    def has_room(self) -> bool:
        """Make progress; return whether the next message can be sent without waiting."""
        with self.lock, self._turn:
            return self._next().test()

    @property
    def is_in_flight(self) -> bool:
        """Make progress; return whether any message is in flight."""
        if not self.lock.acquire(blocking=False):  # the holder polls itself, or was interrupted for good
            return self.may_lag
        try:
            with self._turn:
                self._passed = [slot for slot in self._passed if not slot.test()]
                self._announced = [pair for pair in self._announced if not pair[0].test()]
                self.may_lag = bool(self._passed or self._announced) or not all(slot.test() for slot in self._slots)
                return self.may_lag
        finally:
            self.lock.release()

    def send(self, x: Array, text: str, on_wait: WaitHook) -> None:
        """Send a contiguous array of the dtype, of any shape."""
        if self._owner == threading.get_ident():
            raise UsageError(f"{text}: called during another send on the same channel, perhaps by a signal handler")
        while not self.flag.halted:
            poll(lambda: self.has_room() or self.flag.halted, on_wait)
            with self.lock, self._turn:
                if self.has_room() and not self.flag.halted:
                    self._start(x)
                    return
        on_wait()  # raises the reason

    def _start(self, x: Array) -> None:
        self._owner, self.is_half_way = threading.get_ident(), True
        nbytes = self.form.nbytes(x.shape)
        if nbytes > self._room:
            self._announce(nbytes)
        if x.shape != self.shape:
            self._agree(x.shape)
        slot = self._next()
        slot.tail, slot.row[kernels.LIKE] = None, 0
        self._write_head(slot.head, DATA, x.shape)
        payload = slot.payload(x.ndim)[:nbytes]
        if not self.form.is_plain or address_of(payload) != address_of(x):
            self.form.write(x, payload, self.count)
        length = head_bytes(x.ndim) + nbytes
        request = slot.request
        if request is None or slot.length != length:  # a persistent request has a fixed length
            if request is not None:
                request.close()
            first = slot.memory[: min(length, self._longest)]
            slot.request = request = self._transport.persistent_send(self._peer, self._data_tag(), first)
            slot.length = length
        request.start()
        if length > self._longest:
            slot.tail = self._transport.send(self._peer, self._tag + TAIL, slot.memory[self._longest : length])
        elif self._is_compiled:
            slot.row[kernels.DATA], slot.row[kernels.LIKE] = address_of(payload), self._end[SPEC]
        self.may_lag = True
        slot.shape, slot.view = x.shape, self.form.view(payload, x.shape) if self.form.is_plain else None
        index = int(self._end[SLOT])
        if slot.view is not None:
            self.buffers[index] = slot.view
        self._end[COUNT] += 1
        self._end[SLOT] = (index + 1) % self._depth
        self._owner, self.is_half_way = 0, False

    def _write_head(self, head: Array, kind: int, shape: Shape) -> None:
        head[NUMBER], head[WHAT] = self.count + 1, kind * KIND + len(shape)
        head[LENGTHS : LENGTHS + len(shape)] = shape

    def _announce(self, nbytes: int) -> None:
        head = np.zeros(LENGTHS + 1, np.int64)
        room = max(nbytes, int(GROWTH * self._room))
        self._write_head(head, GROW, (room,))
        self._announced.append((self._transport.send(self._peer, self._data_tag(), head.view(np.uint8).data), head))
        self._grow(room)
        self._passed += self._slots
        self._make_slots()
        self._end[SLOT] = 0

    def buffer(self, shape: Shape, on_wait: WaitHook) -> Array:
        """Return an array that `send` need not copy, unless it is longer than all messages before."""
        if not self.form.is_plain or self.form.nbytes(shape) > self._room:
            return self.form.view(np.empty(self.form.nbytes(shape), np.uint8), shape)
        poll(lambda: self.has_room() or self.flag.halted, on_wait)
        slot = self._next()
        if slot.view is None or slot.shape != shape:
            return self.form.view(slot.payload(len(shape)), shape)
        return slot.view

    def close(self) -> None:
        with self.lock, self._turn:
            super().close()
            for slot in self._passed:
                slot.close()
            for request, _ in self._announced:
                if not request.test():
                    request.cancel()
