"""RingReceiver: take messages out of a ring: each goes to the oldest receive posted for its tag, or is stored."""

from __future__ import annotations

from typing import Any

import numba as nb

from commlib.kernels.fields import arrays as arrays_fields
from commlib.kernels.fields.shm_ring import (
    ASIDE_FIRST,
    ASIDE_LAST,
    DONE,
    DRAINED,
    DTYPES,
    END_FIELDS,
    FREED_AT,
    FULL,
    HALTED,
    HEAD_BYTES,
    HERE,
    MARK,
    MEMORY,
    MESSAGE_TAG,
    MOST_TAGS,
    NBYTES,
    NEXT_AT,
    NOTHING,
    OTHER,
    POSITION,
    POSTS_WAITING,
    RING,
    STOPPED,
    UNIT,
    UNITS,
    WAITING,
)
from commlib.kernels.host import arrays
from commlib.kernels.host import intrinsics as ins
from commlib.kernels.host.arrays import table
from commlib.kernels.host.compilation import kernel
from commlib.kernels.host.ring_posts import deliver, waiting_post
from commlib.kernels.host.ring_unexpected import drop_unexpected, find_unexpected, length_of, store_unexpected
from commlib.kernels.host.shm_ring import (
    claim,
    head_at,
    let_go,
    note_at,
    pause_at,
    unit_at,
)
from commlib.kernels.host.waiting import LONG_WAIT


@kernel(nogil=True)
def _free(end: Any, at: int, units: int) -> None:
    """Return units of the ring to the sender. In units without a message, all but the first begin with 0."""
    for unit in range(1 if head_at(at)[MARK] == NOTHING else units):
        head_at(at + unit * UNIT)[MARK] = 0
    end[POSITION] += units
    ins.store_release(end[MEMORY] + FREED_AT, end[POSITION])


@nb.njit(inline="always")  # type: ignore[untyped-decorator]
def _fits(head: Any, nbytes: int) -> Any:
    return head[MARK] == HERE and head[NBYTES] == nbytes


@kernel(nogil=True)
def _find(end: Any, tag: int, target: int, nbytes: int) -> int:
    """Process arrived messages: deliver them to posted receives, and the first one with `tag`, if it fits, to `target`.

    DONE: it was delivered. WAITING: it has not arrived. OTHER: it has arrived and stays, because it does not fit. FULL:
    the store of unexpected messages is full. DRAINED: another ring follows. Without a tag (-1): process all messages.
    """
    if tag >= 0 and end[ASIDE_FIRST] < end[ASIDE_LAST]:
        at = find_unexpected(end, tag)
        if at != 0:
            if not _fits(head_at(at), nbytes):
                return OTHER
            ins.memcpy(target, at + HEAD_BYTES, nbytes)
            drop_unexpected(end, at)
            return DONE
    if end[RING] == 0:
        return WAITING
    while True:
        at = unit_at(end, end[POSITION] % end[UNITS])
        if ins.load_acquire(at + 8 * MARK) == 0:
            if ins.load_acquire(end[MEMORY] + NEXT_AT) == 0:
                return WAITING
            if ins.load_acquire(at + 8 * MARK) == 0:  # no message arrived between the two checks
                return DRAINED
        head = head_at(at)
        units = length_of(head)
        if head[MARK] != NOTHING:
            index = waiting_post(end, head[MESSAGE_TAG]) if end[POSTS_WAITING] > 0 else -1
            if index >= 0:
                deliver(end, index, at)
            elif head[MESSAGE_TAG] == tag:
                if not _fits(head, nbytes):
                    return OTHER
                ins.memcpy(target, at + HEAD_BYTES, nbytes)
                _free(end, at, units)
                return DONE
            elif not store_unexpected(end, at, units):
                return FULL
        _free(end, at, units)


@kernel(nogil=True)
def take(at: int, array: int, tag: int) -> int:
    """Receive into a numpy array, given by its `id`, after all posted receives for the tag.

    DONE. Or WAITING, STOPPED, OTHER: the array is unchanged, and Python must handle it.
    """
    end = table(at, END_FIELDS)
    if end[HALTED] != 0:
        return STOPPED
    nbytes = arrays.plain_bytes(array, arrays_fields.C_CONTIGUOUS | arrays_fields.WRITEABLE, end[DTYPES])
    if nbytes < 0 or tag < 0 or tag >= MOST_TAGS:
        return OTHER
    target, note = ins.load_acquire(array + arrays_fields.DATA), note_at(end, at, array)
    ins.store_release(note, 0)
    polls = 0
    while True:
        claim(at)
        status = _find(end, tag, target, nbytes)
        let_go(at)
        if status == DONE:
            ins.store_release(note, array)
            return DONE
        if status != WAITING:
            return OTHER
        polls = pause_at(end, polls)
        if polls == LONG_WAIT:
            return WAITING


@kernel(nogil=True)
def look(at: int) -> int:
    """Deliver arrived messages to posted receives. Returns WAITING, FULL or DRAINED, as `_find`. Never waits."""
    claim(at)
    status = _find(table(at, END_FIELDS), -1, 0, 0)
    let_go(at)
    return status
