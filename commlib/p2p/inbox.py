"""The two ends of a channel's direction on a node: the receiver's inbox, and the sender's way into it.

The compiled part is `kernels.host.channel`. This is the memory, what happens where a shape changes, and long waits.

The receiver makes the inbox when it opens the channel. A message that is too long for its slots takes memory that the
sender makes, and describes in the slot's head: so the sender never waits for the receiver to make room for it.
"""

from __future__ import annotations

import json
import threading
from typing import Any

import numpy as np

from commlib.buffers.peer_memory import Mapped, PeerMemory, Place
from commlib.buffers.views import address_of
from commlib.dtypes import Array
from commlib.errors import TransportError, UsageError
from commlib.kernels.host import channel as kernels
from commlib.kernels.host.node import entry_point
from commlib.p2p.form import Form, Shape
from commlib.transport.base import WaitHook

# How long one kernel call waits before it comes back to Python to look around: spins, yields, then 1 ms of naps; and
# after many of those with fewer, longer naps, as on the board.
_YIELDS, _NAPS, _NAP_MICROSECONDS = 2000, 20, 50
_MANY_WAITS, _LONG_NAPS, _LONG_NAP_MICROSECONDS = 150, 5, 2000
_WAITING_FIELDS = [kernels.SPINS, kernels.YIELDS, kernels.NAPS, kernels.NAP_MICROSECONDS]

# From here on a message is written past the caches: two slots and what they are copied from fill them.
_STREAMED_BYTES = 8 << 20

_ALIGNMENT, _PAGE = 128, 4096
_GROWTH = 1.5  # by how much slots grow at least, so that they seldom do
_BLOCK_BYTES = 128  # before the heads: int64 numbers of the memories of the other rank that this one has mapped
_MAPPED_BY_SENDER, _MAPPED_BY_RECEIVER = 0, 8

_put, _take, _hand_back = entry_point(kernels.put, 2), entry_point(kernels.take), entry_point(kernels.hand_back, 2)
_reserve, _put_reserved = entry_point(kernels.reserve), entry_point(kernels.put_reserved, 2)
_let_go, _free_slot, _has_come = map(entry_point, (kernels.let_go, kernels.free_slot, kernels.has_come))
_hand_back_slot = entry_point(kernels.hand_back_slot, 2)

_ARRAYS_ARE_WHERE_EXPECTED = kernels.arrays_are_where_expected()


def _stride(nbytes: int) -> int:
    return max(_ALIGNMENT, -(-nbytes // _ALIGNMENT) * _ALIGNMENT)


class _End:
    """What the kernels know of one end, and the slots' memory."""

    def __init__(self, form: Form, shape: Shape, dtype: np.dtype[Any], depth: int, spins: int) -> None:
        self.form, self.shape, self._dtype, self.depth = form, shape, dtype, depth
        self._end = np.zeros(kernels.END_FIELDS, np.int64)
        self.at: int = self._end.ctypes.data
        self._end[kernels.DEPTH] = depth
        self._end[_WAITING_FIELDS] = spins, _YIELDS, _NAPS, _NAP_MICROSECONDS
        self._end[kernels.STREAMED] = _STREAMED_BYTES
        self._is_halted, self._is_deferred = True, False
        self._end[kernels.HALTED] = 1  # until both ends know each other
        self._memory: Mapped | None = None  # of the heads
        self._slots: list[Array] = []

    @property
    def count(self) -> int:
        """How many messages this end has put, or taken."""
        return int(self._end[kernels.COUNT])

    def halt(self, *, yes: bool) -> None:
        """Let every kernel return STOPPED, or no more."""
        self._is_halted = yes
        self._end[kernels.HALTED] = yes or self._is_deferred

    def _lay_out(self, memory: Mapped, offset: int, stride: int, heads: int | None = None) -> None:
        """Let the slots be in `memory`, from `offset` on; without one, in the heads."""
        self._slots = [memory.array(offset + slot * stride, stride) for slot in range(self.depth)]
        self._end[kernels.DATA], self._end[kernels.STRIDE] = memory.address + offset, stride

    def _lay_out_inbox(self, memory: Mapped, nbytes: int) -> None:
        """Let heads and slots be where `inbox_bytes` has room for them."""
        self._memory = memory
        self._end[kernels.HEADS] = memory.address + _BLOCK_BYTES
        self._block = memory.array(0, _BLOCK_BYTES).view(np.int64)
        self._records = [
            memory.array(_BLOCK_BYTES + slot * kernels.HEAD_BYTES + kernels.RECORD_AT, kernels.RECORD_BYTES)
            for slot in range(self.depth)
        ]
        if nbytes <= kernels.INLINE_BYTES:
            offset = _BLOCK_BYTES + kernels.INLINE_AT
            self._slots = [
                memory.array(offset + slot * kernels.HEAD_BYTES, kernels.INLINE_BYTES) for slot in range(self.depth)
            ]
            self._end[kernels.DATA], self._end[kernels.STRIDE] = memory.address + offset, kernels.HEAD_BYTES
        else:
            self._lay_out(memory, _data_offset(self.depth), _stride(nbytes))

    def _room(self) -> int:
        return len(self._slots[0])

    def _until(self, kernel: Any, on_wait: WaitHook) -> int:
        """Call a kernel until it returns something else than WAITING, and return that."""
        status: int = kernel(self.at)
        if status == kernels.WAITING:
            end = self._end
            usual = end[_WAITING_FIELDS]
            end[kernels.SPINS] = end[kernels.YIELDS] = 0  # a long wait must not burn the core
            waits = 0
            try:
                while status == kernels.WAITING:
                    on_wait()
                    waits += 1
                    if waits == _MANY_WAITS:
                        end[kernels.NAPS], end[kernels.NAP_MICROSECONDS] = _LONG_NAPS, _LONG_NAP_MICROSECONDS
                    status = kernel(self.at)
            finally:
                end[_WAITING_FIELDS] = usual
        return status


def _data_offset(depth: int) -> int:
    return -(-(_BLOCK_BYTES + depth * kernels.HEAD_BYTES) // _PAGE) * _PAGE


def _inbox_bytes(depth: int, nbytes: int) -> int:
    """Return the size of an inbox: heads, and slots for so many bytes unless the heads have room for those."""
    return _data_offset(depth) + (0 if nbytes <= kernels.INLINE_BYTES else depth * _stride(nbytes))


class Inbox(_End):
    """The receiving end. It owns the inbox."""

    def __init__(
        self, form: Form, shape: Shape, dtype: np.dtype[Any], depth: int, spins: int, *, is_named: bool
    ) -> None:
        super().__init__(form, shape, dtype, depth, spins)
        nbytes = form.nbytes(shape)
        self.made = PeerMemory(_inbox_bytes(depth, nbytes), is_named=is_named)
        self._lay_out_inbox(self.made.memory, nbytes)
        self._mapped_before: list[tuple[int, int, int]] = []  # where slots were: start, stride, stop
        self._decoded_before: list[tuple[int, Array]] = []  # views of an earlier shape, with their slots
        self._lock = threading.Lock()
        self.views = [form.view(slot, shape) for slot in self._slots]
        """What `take` gives, by slot."""
        self.take = _take if form.is_plain else _ask_python
        self.hand_back = _hand_back if form.is_plain and _ARRAYS_ARE_WHERE_EXPECTED else _ask_python_too

    @property
    def is_settled(self) -> bool:
        """Whether the other side needs nothing more of this one: it has mapped the inbox."""
        return bool(self._block[_MAPPED_BY_SENDER])

    is_half_way = False  # a message is taken in one step

    def connect(self) -> None:
        """Begin with the first shape, which both ends know."""
        self._end[kernels.SPEC] = 1

    def has_come(self) -> bool:
        return bool(_has_come(self.at))

    def try_take(self) -> Array | None:
        """Nothing to do: `take` has tried."""
        return None

    def recv(self, text: str, on_wait: WaitHook) -> Array | None:
        """Take the next message, and return its view; None if the end is halted.

        Raises UsageError if all slots are held.
        """
        while (slot := self._until(_take, on_wait)) == kernels.OTHER:
            with self._lock:
                self._change()
        if slot == kernels.STOPPED:
            return None
        if slot == kernels.HELD:
            raise UsageError(
                f"{text}: all {self.depth} messages that fit in have been received and none of the oldest handed back: "
                "call release, or open the channel with a greater depth"
            )
        view = self.views[slot]
        self.form.read(self._slots[slot], view)
        return view

    def _change(self) -> None:
        """Read what the sender has written about the next message: another shape, perhaps other memory."""
        slot = int(self._end[kernels.SLOT])
        head = self._memory.array(_BLOCK_BYTES + slot * kernels.HEAD_BYTES, kernels.BACK_AT).view(np.int64)  # type: ignore[union-attr]
        spec = int(head[kernels.SPEC_AT // 8])
        if not self.has_come() or spec == self._end[kernels.SPEC]:
            return  # another thread was here first
        record = json.loads(bytes(self._records[slot]).partition(b"\0")[0])
        if record["memory"] is not None:
            path, name, nbytes = record["memory"]
            try:
                memory = Mapped((path, name, nbytes))
            except OSError as error:
                raise TransportError(f"cannot map the memory of a message from another rank: {error}") from None
            start, stride = int(self._end[kernels.DATA]), int(self._end[kernels.STRIDE])
            self._mapped_before.append((start, stride, start + self.depth * stride))
            self._lay_out(memory, 0, nbytes // self.depth)
            self._block[_MAPPED_BY_RECEIVER] += 1
        self.shape = tuple(record["shape"])
        if not self.form.is_plain:
            self._decoded_before = [*self._decoded_before, *enumerate(self.views)][-2 * self.depth :]
        self.views[:] = [self.form.view(payload, self.shape) for payload in self._slots]
        self._end[kernels.SPEC] = spec

    def release(self, view: Array | None) -> bool:
        """Hand back the slot of a view, or of all that have been received; False if the view is none of them."""
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
        """Let go of the memory; it stays while arrays of it are in use."""
        self.halt(yes=True)
        self.made.withdraw()


def _ask_python(at: int) -> int:
    return kernels.OTHER


def _ask_python_too(at: int, array: int) -> int:
    return kernels.OTHER


class Outbox(_End):
    """The sending end: it writes into the inbox of another rank."""

    def __init__(
        self, form: Form, shape: Shape, dtype: np.dtype[Any], depth: int, spins: int, *, is_named: bool
    ) -> None:
        super().__init__(form, shape, dtype, depth, spins)
        self._is_named = is_named
        self._larger: list[PeerMemory] = []  # for messages that are too long for the inbox
        self._withdrawn = 0
        self._owner = 0  # the thread that has reserved a slot
        self.put = _put if form.is_plain and _ARRAYS_ARE_WHERE_EXPECTED else _ask_python_too
        self.lent: list[Array] = []
        """Where the next message may be written, by slot."""
        self.free_slot = _free_slot if form.is_plain else _ask_python
        self._agree(shape)

    def connect(self, place: Place) -> None:
        """Map the receiver's inbox. Raises OSError."""
        memory = Mapped(place)
        self._lay_out_inbox(memory, self.form.nbytes(self.shape))
        self._agree(self.shape)
        self._back = [
            memory.array(_BLOCK_BYTES + slot * kernels.HEAD_BYTES + kernels.BACK_AT, 8).view(np.int64)
            for slot in range(self.depth)
        ]
        self._block[_MAPPED_BY_SENDER] = 1
        self._end[kernels.SPEC] = 1

    def _agree(self, shape: Shape) -> None:
        """Let `put` take arrays of this shape."""
        self.shape, self._lengths = shape, np.array(shape or (0,), np.int64)
        self._end[kernels.DESCR], self._end[kernels.NDIM] = id(self._dtype), len(shape)
        self._end[kernels.SHAPE], self._end[kernels.NBYTES] = self._lengths.ctypes.data, self.form.nbytes(shape)
        if self.form.is_plain:
            self.lent[:] = [self.form.view(slot, shape) for slot in self._slots]

    def has_room(self) -> bool:
        """Return whether the next message need not wait."""
        back = self._back[int(self._end[kernels.SLOT])]
        return int(back[0]) > self.count - self.depth

    def try_put(self, x: Any) -> bool:
        """Nothing to do: `put` has tried."""
        return False

    def send(self, x: Array, text: str, on_wait: WaitHook) -> None:
        """Put a contiguous array of the dtype, of any shape."""
        thread = threading.get_ident()
        if self._owner == thread:
            raise UsageError(
                f"{text}: called in the middle of another send of the same channel, in the same thread: by a signal "
                "handler? Let the handler set a flag, and send after the other call has ended"
            )
        slot = self._until(_reserve, on_wait)
        self._owner = thread
        if x.shape != self.shape:
            self._announce(slot, x.shape)
        if self.form.is_plain:
            _put_reserved(self.at, address_of(x))
        else:
            payload = self._slots[slot]
            self.form.write(x, payload[: self.form.nbytes(x.shape)], self.count)
            _put_reserved(self.at, address_of(payload))
        self._owner = 0

    @property
    def is_half_way(self) -> bool:
        """Whether a send was interrupted between two steps of its own: a slot may be reserved for good."""
        return self._owner != 0 or bool(self._end[kernels.BUSY])

    def _announce(self, slot: int, shape: Shape) -> None:
        nbytes, memory = self.form.nbytes(shape), None
        if nbytes > self._room():
            self.tidy()
            stride = _stride(max(nbytes, int(_GROWTH * self._room())))
            self._larger.append(PeerMemory(self.depth * stride, is_named=self._is_named))
            memory = self._larger[-1].place
        text = json.dumps({"shape": shape, "memory": memory}).encode()
        self._records[slot][: len(text) + 1] = np.frombuffer(text + b"\0", np.uint8)
        if memory is not None:
            self._lay_out(self._larger[-1].memory, 0, self._larger[-1].place[2] // self.depth)
        self._agree(shape)
        self._end[kernels.SPEC] += 1

    def buffer(self, shape: Shape, on_wait: WaitHook) -> Array:
        """Return an array that `send` need not copy: it lies in the next free slot, if that has room for it."""
        if not self.form.is_plain or self.form.nbytes(shape) > self._room():
            return np.empty(shape, self._dtype)
        slot = self._until(_reserve, on_wait)
        _let_go(self.at)
        return self.lent[slot] if shape == self.shape else self.form.view(self._slots[slot], shape)

    @property
    def is_settled(self) -> bool:
        """Whether the other side needs nothing more of this one: it has mapped all memory that messages lie in."""
        self.tidy()
        return not self._larger

    @property
    def may_lag(self) -> bool:
        """Whether `is_under_way` may be true."""
        return bool(self._larger)

    @property
    def is_under_way(self) -> bool:
        """Whether the receiver has still to map memory in which a message lies."""
        return not self.is_settled

    def defer(self, *, yes: bool) -> None:
        """Let `put` return STOPPED, because other messages must go first; or no more."""
        self._is_deferred = yes
        self._end[kernels.HALTED] = yes or self._is_halted

    def tidy(self) -> None:
        """Let nobody find memory that the receiver has mapped."""
        while self._larger and self._withdrawn < self._block[_MAPPED_BY_RECEIVER]:
            self._larger.pop(0).withdraw()
            self._withdrawn += 1

    def close(self) -> None:
        """Let go of the memory, also of messages that the receiver has not found."""
        self.halt(yes=True)
        for memory in self._larger:
            memory.withdraw()
