"""Messages of a channel within a node: put, take and release a message in one compiled call each, without the GIL.

An *inbox* is memory of its receiver that both ranks map. Its slots are used in turn. Message number n (from 1) goes to
slot (n - 1) % depth. Its sender waits until the receiver has released the previous message in that slot, copies the
array in, and writes n with release order. The receiver reads n with acquire order, and may then read the data. To
release the slot, it writes n to a separate cache line. No other data is shared, so stores never contend.

The arguments of a kernel are in one int64 array, the *end* of its rank, whose fields are in `fields.channel`. A kernel
that has waited long returns WAITING without any change; the caller calls it again. `BUSY` is taken atomically, so a
second thread, or a signal handler that interrupts Python between two calls, never sees a partial message.
"""

from __future__ import annotations

from typing import Any

import numba as nb

from commlib.kernels.fields import arrays as arrays_fields
from commlib.kernels.fields.channel import (
    BACK_AT,
    BUSY,
    COUNT,
    DATA,
    DEPTH,
    DESCR,
    DONE,
    END_FIELDS,
    HALTED,
    HEAD_BYTES,
    HEADS,
    HELD,
    NAP_MICROSECONDS,
    NAPS,
    NBYTES,
    NDIM,
    NUMBER_AT,
    OTHER,
    SHAPE,
    SLOT,
    SPEC,
    SPEC_AT,
    SPINS,
    STOPPED,
    STREAMED,
    STRIDE,
    WAITING,
    YIELDS,
)
from commlib.kernels.host import arrays
from commlib.kernels.host import intrinsics as ins
from commlib.kernels.host.arrays import table as _table
from commlib.kernels.host.compilation import kernel
from commlib.kernels.host.stream import stream_copy
from commlib.kernels.host.waiting import LONG_WAIT, pause


@nb.njit(inline="always")  # type: ignore[untyped-decorator]
def enter(address: int) -> Any:
    """Take BUSY; return False if another call holds it."""
    return arrays.exchange_if(address + 8 * BUSY, 0, 1) == 0


@nb.njit(inline="always")  # type: ignore[untyped-decorator]
def leave(address: int) -> None:
    """Release BUSY."""
    ins.store_release(address + 8 * BUSY, 0)


@kernel(nogil=True)
def _await(end: Any, flag: int, number: int) -> bool:
    """Wait until the int64 at `flag` is at least `number`; return False after a long wait."""
    polls = 0
    while ins.load_acquire(flag) < number:
        polls = pause(polls, end[SPINS], end[YIELDS], end[NAPS], end[NAP_MICROSECONDS])
        if polls == LONG_WAIT:
            return False
    return True


@nb.njit(inline="always")  # type: ignore[untyped-decorator]
def is_as_agreed(end: Any, array: int) -> Any:
    """Return whether a numpy array, given by its `id`, has the agreed dtype and shape, and is contiguous."""
    plain = arrays_fields.C_CONTIGUOUS | arrays_fields.ALIGNED
    if (
        ins.load_acquire(array + arrays_fields.DESCR) != end[DESCR]
        or arrays.int32(array + arrays_fields.FLAGS) & plain != plain
    ):
        return False
    if arrays.int32(array + arrays_fields.NDIM) != end[NDIM]:
        return False
    ours, theirs = _table(end[SHAPE], end[NDIM]), _table(ins.load_acquire(array + arrays_fields.SHAPE), end[NDIM])
    for dimension in range(end[NDIM]):  # noqa: SIM110  numba has no generators
        if ours[dimension] != theirs[dimension]:
            return False
    return True


@nb.njit(inline="always")  # type: ignore[untyped-decorator]
def _await_room(end: Any) -> Any:
    """Wait until the receiver has released the previous message in the next slot, unless there was none."""
    return _await(end, end[HEADS] + end[SLOT] * HEAD_BYTES + BACK_AT, end[COUNT] + 1 - end[DEPTH])


@nb.njit(inline="always")  # type: ignore[untyped-decorator]
def _advance(end: Any) -> None:
    end[COUNT] += 1
    end[SLOT] = 0 if end[SLOT] + 1 == end[DEPTH] else end[SLOT] + 1


@nb.njit(inline="always")  # type: ignore[untyped-decorator]
def _publish(end: Any, source: int) -> None:
    """Copy NBYTES from `source` to the next slot, unless it already contains them, and publish the message."""
    head, target = end[HEADS] + end[SLOT] * HEAD_BYTES, end[DATA] + end[SLOT] * end[STRIDE]
    if source != target and end[NBYTES] > 0:
        if end[NBYTES] < end[STREAMED]:
            ins.memcpy(target, source, end[NBYTES])
        else:
            stream_copy(target, source, end[NBYTES])
    ins.store_release(head + SPEC_AT, end[SPEC])
    ins.store_release(head + NUMBER_AT, end[COUNT] + 1)
    _advance(end)


@kernel(nogil=True)
def put(address: int, array: int) -> int:
    """Put a numpy array, given by its `id`, into the peer's inbox: DONE, WAITING, STOPPED or OTHER (not as agreed)."""
    end = _table(address, END_FIELDS)
    if end[HALTED] != 0:
        return STOPPED
    if not enter(address):
        ins.usleep(end[NAP_MICROSECONDS])
        return WAITING
    status = WAITING
    if not is_as_agreed(end, array):
        status = OTHER
    elif _await_room(end):
        _publish(end, ins.load_acquire(array + arrays_fields.DATA))
        status = DONE
    leave(address)
    return status


@kernel(nogil=True)
def free_slot(address: int) -> int:
    """Return the slot of the next message if it is free, else WAITING or STOPPED. Never blocks."""
    end = _table(address, END_FIELDS)
    if end[HALTED] != 0:
        return STOPPED
    flag = end[HEADS] + end[SLOT] * HEAD_BYTES + BACK_AT
    return end[SLOT] if ins.load_acquire(flag) > end[COUNT] - end[DEPTH] else WAITING


@kernel(nogil=True)
def has_arrived(address: int) -> int:
    """Return 1 if the next message has arrived, else 0."""
    end = _table(address, END_FIELDS)
    return 1 if ins.load_acquire(end[HEADS] + end[SLOT] * HEAD_BYTES + NUMBER_AT) > end[COUNT] else 0


@kernel(nogil=True)
def reserve(address: int) -> int:
    """Wait for a free slot and return it, or WAITING. The end stays BUSY until `put_reserved` or `let_go`."""
    end = _table(address, END_FIELDS)
    if not enter(address):
        ins.usleep(end[NAP_MICROSECONDS])
        return WAITING
    if not _await_room(end):
        leave(address)
        return WAITING
    return end[SLOT]


@kernel(nogil=True)
def put_reserved(address: int, source: int) -> int:
    """Put NBYTES from an address into the slot that `reserve` has returned."""
    _publish(_table(address, END_FIELDS), source)
    leave(address)
    return DONE


@kernel(nogil=True)
def let_go(address: int) -> int:
    """Give up a slot that `reserve` has returned."""
    leave(address)
    return DONE


@kernel(nogil=True)
def take(address: int) -> int:
    """Take the next message and return its slot, or WAITING, STOPPED, or HELD if the receiver holds all slots.

    Returns OTHER, without taking a message, if it differs from the previous one; the slot's record describes it.
    """
    end = _table(address, END_FIELDS)
    if end[HALTED] != 0:
        return STOPPED
    if not enter(address):
        ins.usleep(end[NAP_MICROSECONDS])
        return WAITING
    slot = end[SLOT]
    head, number = end[HEADS] + slot * HEAD_BYTES, end[COUNT] + 1
    if ins.load_acquire(head + BACK_AT) < number - end[DEPTH]:
        status = HELD
    elif not _await(end, head + NUMBER_AT, number):
        status = WAITING
    elif ins.load_acquire(head + SPEC_AT) != end[SPEC]:
        status = OTHER
    else:
        _advance(end)
        status = slot
    leave(address)
    return status


@kernel(nogil=True)
def release(address: int, array: int) -> int:
    """Release the slot that contains a numpy array, given by its `id`; 0 releases all. OTHER if no slot contains it."""
    end = _table(address, END_FIELDS)
    if array == 0:
        first = max(0, end[COUNT] - end[DEPTH])
        for number in range(first, end[COUNT]):
            head = end[HEADS] + number % end[DEPTH] * HEAD_BYTES
            ins.store_release(head + BACK_AT, number + 1)
        return DONE
    offset = ins.load_acquire(array + arrays_fields.DATA) - end[DATA]
    if offset < 0 or offset >= end[DEPTH] * end[STRIDE]:
        return OTHER
    return release_slot(address, offset // end[STRIDE])


@kernel(nogil=True)
def release_slot(address: int, slot: int) -> int:
    """Release a slot, if the receiver holds a message in it."""
    end = _table(address, END_FIELDS)
    head = end[HEADS] + slot * HEAD_BYTES
    number = ins.load_acquire(head + NUMBER_AT)
    if number <= end[COUNT]:  # else it was released already, and holds the next message
        ins.store_release(head + BACK_AT, number)
    return DONE
