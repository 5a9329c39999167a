"""PostedReceives: the receiving end of a channel between nodes, with `depth` receives posted before any send."""

from __future__ import annotations

from typing import Any

import numpy as np

from commlib.buffers.views import address_of
from commlib.dtypes import Array
from commlib.errors import TransportError, UsageError
from commlib.kernels.host import network_channel as kernels
from commlib.kernels.host.channel import COUNT
from commlib.kernels.host.network_channel import (
    DATA,
    FIRST,
    HELD,
    KIND,
    KNOWN,
    LENGTH,
    LENGTHS,
    LIKE,
    NBYTES,
    NUMBER,
    POSTED,
    RING,
    WHAT,
)
from commlib.kernels.host.node import entry_point
from commlib.p2p.channels.node_end import defer_array_to_python, defer_to_python
from commlib.p2p.channels.posted_end import GROW, TAIL, PostedEnd, PostedSlot, head_bytes
from commlib.transport.base import WaitHook
from commlib.transport.polling import poll

_take, _hand_back = entry_point(kernels.take), entry_point(kernels.release, 2)


class PostedReceives(PostedEnd):
    """The receiving end of a channel between nodes."""

    def __init__(self, *args: Any, tag: int) -> None:
        super().__init__(*args)
        self._tag = tag
        self._ring = np.zeros(self._depth, np.int64)  # slots in the order in which messages arrive
        self._end[RING] = address_of(self._ring)
        self._old_views: list[Array] = []  # unreleased views of earlier, smaller memory
        self.views: list[Array] = []
        """The view for each slot number that `take` returns."""
        self.take = _take if self._is_compiled else defer_to_python
        self.hand_back = _hand_back if self._is_compiled else defer_array_to_python
        self._post_all()

    is_settled = True
    """Whether the other side needs no more from this side."""

    def connect(self) -> None:
        """Do nothing: the receives are already posted."""

    def _post_all(self) -> None:
        self._make_slots()
        self.views[:] = [slot.payload(0) for slot in self._slots]
        self._end[FIRST] = self._end[POSTED] = 0
        for number, slot in enumerate(self._slots):
            head = slot.memory[: self._longest]
            slot.request = self._transport.persistent_recv(self._peer, self._data_tag(), head)
            self._post(number)

    def _post(self, number: int) -> None:
        slot = self._slots[number]
        assert slot.request is not None
        slot.request.start()
        slot.row[HELD], slot.row[LENGTH] = 0, -1
        self._ring[(self._end[FIRST] + self._end[POSTED]) % self._depth] = number
        self._end[POSTED] += 1

    def _pending_slots(self) -> list[PostedSlot]:
        """Return the slots with posted receives, the next one first."""
        first = int(self._end[FIRST])
        return [self._slots[self._ring[(first + n) % self._depth]] for n in range(int(self._end[POSTED]))]

    def _unreleased(self) -> list[int]:
        """Return the numbers of the unreleased slots, the oldest first."""
        return sorted(np.flatnonzero(self._rows[:, HELD]).tolist(), key=lambda number: int(self._rows[number, HELD]))

    def has_arrived(self) -> bool:
        """Make progress; return whether the next message has arrived."""
        with self.lock, self._turn:
            while not self.flag.halted and self._end[POSTED]:
                slot = self._pending_slots()[0]
                assert slot.request is not None
                if not slot.request.test():
                    return False
                if slot.row[LENGTH] < 0:
                    self._read_head(slot)
                    continue
                return slot.tail is None or slot.tail.test()
            return False

    def _read_head(self, slot: PostedSlot) -> None:
        head = slot.head
        if head[NUMBER] != self.count + 1:
            raise TransportError(
                f"a channel from rank {self._peer}: expected message {self.count + 1}, got message {head[NUMBER]}"
            )
        self.is_half_way = True
        kind, ndim = divmod(int(head[WHAT]), KIND)
        if kind == GROW:
            old = self._pending_slots()
            self._old_views += [view for number in self._unreleased() if (view := self._slots[number].view) is not None]
            self._grow(int(head[LENGTHS]))
            self._post_all()
            for passed in old:  # no more messages arrive under their tag
                passed.close()
            self.is_half_way = False
            return
        length = self.form.nbytes(slot.shape_here())
        if head_bytes(ndim) + length > self._longest:
            rest = slot.memory[self._longest : head_bytes(ndim) + length]
            slot.tail = self._transport.recv(self._peer, self._tag + TAIL, rest)
        slot.row[LENGTH] = length
        self.is_half_way = False

    def recv(self, text: str, on_wait: WaitHook) -> Array | None:
        """Receive the next message and return its view; None if the end is halted.

        Raises UsageError if all slots hold unreleased messages.
        """
        while not self.flag.halted:
            poll(lambda: self.has_arrived() or not self._end[POSTED] or self.flag.halted, on_wait)
            with self.lock, self._turn:
                if self.has_arrived():
                    return self._take()
                if not self._end[POSTED] and not self.flag.halted:
                    raise UsageError(
                        f"{text}: all {self._depth} slots hold received messages, and none is released: call release, "
                        "or open the channel with a larger depth"
                    )
        return None

    def _take(self) -> Array:
        self.is_half_way = True
        number = int(self._ring[self._end[FIRST]])
        slot = self._slots[number]
        view = slot.read(self.form, int(slot.row[LENGTH]))
        # Compiled functions receive the next message in this slot if it has the same shape.
        header = slot.head[WHAT : LENGTHS + view.ndim]
        slot.row[KNOWN : KNOWN + len(header)] = header
        slot.row[DATA], slot.row[NBYTES] = address_of(slot.payload(view.ndim)), slot.row[LENGTH]
        slot.row[LIKE] = self._is_compiled and slot.tail is None
        slot.tail = None
        self.views[number] = view
        self._end[FIRST] = (self._end[FIRST] + 1) % self._depth
        self._end[POSTED] -= 1
        self._end[COUNT] += 1
        slot.row[HELD] = self._end[COUNT]
        self.is_half_way = False
        return view

    def release(self, view: Array | None) -> bool:
        """Release the slot of a view, or all slots, and repost; return False if the view is not a received message."""
        with self.lock, self._turn:
            self.is_half_way = True
            slots = self._unreleased()
            if view is None:
                chosen, before = slots, self._old_views
            else:
                chosen = [number for number in slots if _is_in(view, self._slots[number])][:1]
                before = [old for old in self._old_views if np.may_share_memory(view, old)][:1]
            for number in chosen:
                if self.flag.halted:
                    self._slots[number].row[HELD] = 0
                else:
                    self._post(number)
            self._old_views = [old for old in self._old_views if not any(old is handed for handed in before)]
            self.is_half_way = False
            return bool(chosen or before) or view is None


def _is_in(view: Array, slot: PostedSlot) -> bool:
    own = slot.view
    return view is own or bool(np.may_share_memory(view, own) or np.may_share_memory(view, slot.payload(0)))
