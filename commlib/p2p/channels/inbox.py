"""Inbox: the receiving end of a channel on one node. It owns the memory."""

from __future__ import annotations

import json
import threading
from typing import Any

import numpy as np

from commlib.buffers.peer_memory import PeerMapping, PeerMemory
from commlib.buffers.views import address_of
from commlib.dtypes import Array
from commlib.errors import TransportError, UsageError
from commlib.kernels.host import channel as kernels
from commlib.kernels.host.node import entry_point
from commlib.p2p.channels.node_end import (
    ARRAYS_ARE_WHERE_EXPECTED,
    BLOCK_BYTES,
    MAPPED_BY_RECEIVER,
    MAPPED_BY_SENDER,
    NodeEnd,
    defer_array_to_python,
    defer_to_python,
    inbox_bytes,
)
from commlib.p2p.channels.payload import PayloadFormat, Shape
from commlib.transport.base import WaitHook

_take, _hand_back = entry_point(kernels.take), entry_point(kernels.release, 2)
_has_arrived, _hand_back_slot = entry_point(kernels.has_arrived), entry_point(kernels.release_slot, 2)


class Inbox(NodeEnd):
    """The receiving end of a channel, and the owner of the shared slots."""

    def __init__(
        self, form: PayloadFormat, shape: Shape, dtype: np.dtype[Any], depth: int, spins: int, *, is_named: bool
    ) -> None:
        super().__init__(form, shape, dtype, depth, spins)
        nbytes = form.nbytes(shape)
        self.peer_memory = PeerMemory(inbox_bytes(depth, nbytes), is_named=is_named)
        self._lay_out_inbox(self.peer_memory.memory, nbytes)
        self._mapped_before: list[tuple[int, int, int]] = []  # earlier slot memory: start, stride, stop
        self._decoded_before: list[tuple[int, Array]] = []  # views of an earlier shape, with their slots
        self._lock = threading.Lock()
        self.views = [form.view(slot, shape) for slot in self._slots]
        """The view for each slot number that `take` returns."""
        self.take = _take if form.is_plain else defer_to_python
        self.hand_back = _hand_back if form.is_plain and ARRAYS_ARE_WHERE_EXPECTED else defer_array_to_python

    @property
    def is_settled(self) -> bool:
        """Whether the other side needs no more memory from this side: it has mapped the inbox."""
        return bool(self._block[MAPPED_BY_SENDER])

    is_half_way = False  # a message is received in one step

    def connect(self) -> None:
        """Connect; the first messages have the shape that both ends have agreed on."""
        self._end[kernels.SPEC] = 1

    def has_arrived(self) -> bool:
        return bool(_has_arrived(self.at))

    def recv(self, text: str, on_wait: WaitHook) -> Array | None:
        """Receive the next message and return its view; None if the end is halted.

        Raises UsageError if all slots hold unreleased messages.
        """
        while (slot := self._until(_take, on_wait)) == kernels.OTHER:
            with self._lock:
                self._change()
        if slot == kernels.STOPPED:
            return None
        if slot == kernels.HELD:
            raise UsageError(
                f"{text}: all {self.depth} slots hold received messages, and the oldest is not released: call release, "
                "or open the channel with a larger depth"
            )
        view = self.views[slot]
        self.form.read(self._slots[slot], view)
        return view

    def _change(self) -> None:
        """Read the sender's record of the next message: a new shape, perhaps new memory."""
        slot = int(self._end[kernels.SLOT])
        head = self._memory.array(BLOCK_BYTES + slot * kernels.HEAD_BYTES, kernels.BACK_AT).view(np.int64)  # type: ignore[union-attr]
        spec = int(head[kernels.SPEC_AT // 8])
        if not self.has_arrived() or spec == self._end[kernels.SPEC]:
            return  # another thread has done this already
        record = json.loads(bytes(self._records[slot]).partition(b"\0")[0])
        if record["memory"] is not None:
            path, name, nbytes = record["memory"]
            try:
                memory = PeerMapping((path, name, nbytes))
            except OSError as error:
                raise TransportError(f"cannot map the memory of a message from another rank: {error}") from None
            start, stride = int(self._end[kernels.DATA]), int(self._end[kernels.STRIDE])
            self._mapped_before.append((start, stride, start + self.depth * stride))
            self._lay_out(memory, 0, nbytes // self.depth)
            self._block[MAPPED_BY_RECEIVER] += 1
        self.shape = tuple(record["shape"])
        if not self.form.is_plain:
            self._decoded_before = [*self._decoded_before, *enumerate(self.views)][-2 * self.depth :]
        self.views[:] = [self.form.view(payload, self.shape) for payload in self._slots]
        self._end[kernels.SPEC] = spec

    def release(self, view: Array | None) -> bool:
        """Release the slot of a view, or all slots; return False if the view is not a received message."""
        if view is None:
            _hand_back(self.at, 0)
            return True
        for slot, known in [*enumerate(self.views), *self._decoded_before]:
            if known is view or (not self.form.is_plain and np.may_share_memory(known, view)):
                _hand_back_slot(self.at, slot)
                return True
        address = address_of(view)
        here = int(self._end[kernels.DATA]), int(self._end[kernels.STRIDE]), 0
        for start, stride, _ in (here, *self._mapped_before):
            if start <= address < start + self.depth * stride:
                _hand_back_slot(self.at, (address - start) // stride)
                return True
        return False

    def close(self) -> None:
        """Drop the memory; it stays alive while arrays of it are in use."""
        self.flag.halt(yes=True)
        self.peer_memory.withdraw()
