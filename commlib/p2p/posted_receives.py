"""The receiving end of a channel between nodes: `depth` receives, posted before anything is sent."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from commlib.dtypes import Array
from commlib.errors import TransportError, UsageError
from commlib.p2p.posted import (
    EAGER,
    GROW,
    HEAD_BYTES,
    KIND,
    NBYTES,
    NUMBER,
    TAIL,
    PostedEnd,
    Slot,
)
from commlib.transport.base import WaitHook
from commlib.transport.polling import poll


@dataclass(frozen=True, slots=True, eq=False)
class _Held:
    """A message that was received and not handed back."""

    view: Array
    slot: Slot


class PostedReceives(PostedEnd):
    """The receiving end."""

    def __init__(self, *args: Any, tag: int, **options: Any) -> None:
        super().__init__(*args, **options)
        self._tag = tag
        self._posted: deque[Slot] = deque()  # in the order in which messages will take them
        self._held: list[_Held] = []  # the oldest first
        self.views: list[Array] = []
        self._post_all()

    is_settled = True
    """Whether the other side needs nothing more of this one."""

    def connect(self) -> None:
        """Begin: the receives are there already."""

    def _post_all(self) -> None:
        self._slots = [Slot(self._room, self._generation) for _ in range(self._depth)]
        for slot in self._slots:
            head = slot.memory[: self._longest]
            slot.request = self._transport.persistent_recv(self._peer, self._data_tag(), head)
            self._post(slot)

    def _post(self, slot: Slot) -> None:
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

    def _read_head(self, slot: Slot) -> None:
        head = slot.head
        if head[NUMBER] != self.count + 1:
            raise TransportError(
                f"a channel from rank {self._peer}: message {self.count + 1} was expected, number {head[NUMBER]} came"
            )
        length = int(head[NBYTES])
        self.is_half_way = True
        if head[KIND] == GROW:
            old = list(self._posted)
            self._grow(length)
            self._posted.clear()
            self._post_all()
            for passed in old:  # nothing more comes under their tag
                passed.close()
            self.is_half_way = False
            return
        if HEAD_BYTES + length > self._longest:
            rest = slot.memory[self._longest : HEAD_BYTES + length]
            slot.tail = self._transport.recv(self._peer, self._tag + TAIL, rest)
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
                for _ in range(EAGER):
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
