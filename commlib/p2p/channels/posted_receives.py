"""PostedReceives: receive a channel's messages between nodes, by `depth` receives posted before anything is sent."""

from __future__ import annotations

from typing import Any

import numpy as np

from commlib.buffers.views import address_of
from commlib.dtypes import Array
from commlib.errors import TransportError, UsageError
from commlib.kernels.host import posted as kernels
from commlib.kernels.host.channel import COUNT
from commlib.kernels.host.node import entry_point
from commlib.kernels.host.posted import (
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
from commlib.p2p.channels.node_end import ask_python, ask_python_too
from commlib.p2p.channels.posted import GROW, TAIL, PostedEnd, Slot, head_bytes
from commlib.transport.base import WaitHook
from commlib.transport.polling import poll

_take, _hand_back = entry_point(kernels.take), entry_point(kernels.hand_back, 2)


class PostedReceives(PostedEnd):
    """The receiving end."""

    def __init__(self, *args: Any, tag: int) -> None:
        super().__init__(*args)
        self._tag = tag
        self._ring = np.zeros(self._depth, np.int64)  # slots, in the order in which messages will take them
        self._end[RING] = address_of(self._ring)
        self._held_before: list[Array] = []  # views of memory that was too short
        self.views: list[Array] = []
        """What `take` gives, by slot."""
        self.take = _take if self._is_compiled else ask_python
        self.hand_back = _hand_back if self._is_compiled else ask_python_too
        self._post_all()

    is_settled = True
    """Whether the other side needs nothing more of this one."""

    def connect(self) -> None:
        """Begin: the receives are there already."""

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

    def _awaited(self) -> list[Slot]:
        """Return the slots that messages will come to, the next one first."""
        first = int(self._end[FIRST])
        return [self._slots[self._ring[(first + n) % self._depth]] for n in range(int(self._end[POSTED]))]

    def _held(self) -> list[int]:
        """Return the slots that were taken and not handed back, the first one first."""
        return sorted(np.flatnonzero(self._rows[:, HELD]).tolist(), key=lambda number: int(self._rows[number, HELD]))

    def has_come(self) -> bool:
        """Make progress; return whether the next message is there."""
        with self.lock, self._turn:
            while not self._halted and self._end[POSTED]:
                slot = self._awaited()[0]
                assert slot.request is not None
                if not slot.request.test():
                    return False
                if slot.row[LENGTH] < 0:
                    self._read_head(slot)
                    continue
                return slot.tail is None or slot.tail.test()
            return False

    def _read_head(self, slot: Slot) -> None:
        head = slot.head
        if head[NUMBER] != self.count + 1:
            raise TransportError(
                f"a channel from rank {self._peer}: message {self.count + 1} was expected, number {head[NUMBER]} came"
            )
        self.is_half_way = True
        kind, ndim = divmod(int(head[WHAT]), KIND)
        if kind == GROW:
            old = self._awaited()
            self._held_before += [view for number in self._held() if (view := self._slots[number].view) is not None]
            self._grow(int(head[LENGTHS]))
            self._post_all()
            for passed in old:  # nothing more comes under their tag
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
        """Take the next message and return its view; None if the end is halted.

        Raises UsageError if the memory of all is held.
        """
        while not self._halted:
            poll(lambda: self.has_come() or not self._end[POSTED] or self._halted, on_wait)
            with self.lock, self._turn:
                if self.has_come():
                    return self._take()
                if not self._end[POSTED] and not self._halted:
                    raise UsageError(
                        f"{text}: all {self._depth} messages that fit in have been received and none handed back: call "
                        "release, or open the channel with a greater depth"
                    )
        return None

    def _take(self) -> Array:
        self.is_half_way = True
        number = int(self._ring[self._end[FIRST]])
        slot = self._slots[number]
        view = slot.read(self.form, int(slot.row[LENGTH]))
        # The next one here goes by compiled functions if it is alike.
        known = slot.head[WHAT : LENGTHS + view.ndim]
        slot.row[KNOWN : KNOWN + len(known)] = known
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
        """Post the memory of a view anew, or of all that have been received; False if the view is none of them."""
        with self.lock, self._turn:
            self.is_half_way = True
            held = self._held()
            if view is None:
                chosen, before = held, self._held_before
            else:
                chosen = [number for number in held if _is_in(view, self._slots[number])][:1]
                before = [old for old in self._held_before if np.may_share_memory(view, old)][:1]
            for number in chosen:
                if self._halted:
                    self._slots[number].row[HELD] = 0
                else:
                    self._post(number)
            self._held_before = [old for old in self._held_before if not any(old is handed for handed in before)]
            self.is_half_way = False
            return bool(chosen or before) or view is None


def _is_in(view: Array, slot: Slot) -> bool:
    known = slot.view
    return view is known or bool(np.may_share_memory(view, known) or np.may_share_memory(view, slot.payload(0)))
