"""RingSender: put messages into the next free units of a ring, and write the marks of their headers last."""

from __future__ import annotations

from typing import Any

import numba as nb

from commlib.kernels.fields import arrays as arrays_fields
from commlib.kernels.fields.shm_ring import (
    DONE,
    DTYPES,
    ELSEWHERE,
    ELSEWHERE_SENT,
    END_FIELDS,
    FREED_AT,
    FULL,
    HALTED,
    HEAD_BYTES,
    HERE,
    LONGEST,
    MARK,
    MEMORY,
    MESSAGE_TAG,
    MOST_TAGS,
    NBYTES,
    NOTHING,
    OTHER,
    POSITION,
    SEEN,
    STOPPED,
    UNITS,
    WAY_NUMBER,
)
from commlib.kernels.host import arrays
from commlib.kernels.host import intrinsics as ins
from commlib.kernels.host.arrays import table
from commlib.kernels.host.compilation import kernel
from commlib.kernels.host.shm_ring import (
    claim,
    head_at,
    let_go,
    note_at,
    pause_at,
    unit_at,
    units_of,
)
from commlib.kernels.host.waiting import LONG_WAIT

# After this many units, an empty ring is used from its start again, because these units stay in the fastest caches.
_SOON = 256


@nb.njit(inline="always")  # type: ignore[untyped-decorator]
def _write_head(at: int, mark: int, tag: int, nbytes: int, number: int) -> None:
    head = head_at(at)
    head[MESSAGE_TAG], head[NBYTES], head[WAY_NUMBER] = tag, nbytes, number
    ins.store_release(at + 8 * MARK, mark)


@nb.njit(inline="always")  # type: ignore[untyped-decorator]
def _update_freed(end: Any) -> None:
    end[SEEN] = ins.load_acquire(end[MEMORY] + FREED_AT)


@kernel(nogil=True)
def _reserve(end: Any, units: int) -> int:
    """Return the address of consecutive free units, or 0."""
    size = end[UNITS]
    place = end[POSITION] % size
    rest = size - place
    wraps = units > rest
    if place // _SOON != (place + units) // _SOON and not wraps:
        _update_freed(end)
        wraps = end[SEEN] == end[POSITION] and rest + units <= size
    needed = rest + units if wraps else units
    if needed > size - (end[POSITION] - end[SEEN]):
        _update_freed(end)
        if needed > size - (end[POSITION] - end[SEEN]):
            return 0
    at = unit_at(end, place)
    if wraps:
        _write_head(at, NOTHING, 0, rest, 0)
        end[POSITION] += rest
        at = unit_at(end, 0)
    end[POSITION] += units
    return at


@kernel(nogil=True)
def _put(end: Any, tag: int, source: int, nbytes: int) -> int:
    """Copy a message into the ring: DONE or FULL."""
    at = _reserve(end, units_of(nbytes))
    if at == 0:
        return FULL
    if nbytes > 0:
        ins.memcpy(at + HEAD_BYTES, source, nbytes)
    _write_head(at, HERE, tag, nbytes, 0)
    return DONE


@kernel(nogil=True)
def put(at: int, array: int, tag: int) -> int:
    """Send a numpy array, given by its `id`. DONE, STOPPED, OTHER (unsuitable array), or FULL after a long wait."""
    end = table(at, END_FIELDS)
    if end[HALTED] != 0:
        return STOPPED
    nbytes = arrays.plain_bytes(array, arrays_fields.C_CONTIGUOUS, end[DTYPES])
    if nbytes < 0 or nbytes > end[LONGEST] or tag < 0 or tag >= MOST_TAGS:
        return OTHER
    source, note = ins.load_acquire(array + arrays_fields.DATA), note_at(end, at, array)
    ins.store_release(note, 0)
    polls = 0
    while True:
        claim(at)
        status = _put(end, tag, source, nbytes)
        let_go(at)
        if status == DONE:
            ins.store_release(note, array)
            return DONE
        polls = pause_at(end, polls)
        if polls == LONG_WAIT:
            return FULL


@kernel(nogil=True)
def put_bytes(at: int, tag: int, source: int, nbytes: int) -> int:
    """Send bytes at an address: DONE or FULL. Never waits."""
    claim(at)
    status = _put(table(at, END_FIELDS), tag, source, nbytes)
    let_go(at)
    return status


@kernel(nogil=True)
def announce(at: int, tag: int, nbytes: int, piece: int) -> int:
    """Send the header of a message that takes another path, and return its number, from 0; or FULL. Never waits.

    piece: bytes of each of its pieces except the last one, or 0 for a message in one piece. The header packs both in
    one number.
    """
    end = table(at, END_FIELDS)
    claim(at)
    status, head = FULL, _reserve(end, 1)
    if head != 0:
        status = end[ELSEWHERE_SENT]
        end[ELSEWHERE_SENT] += 1
        _write_head(head, ELSEWHERE, tag, nbytes, piece * MOST_TAGS + status % MOST_TAGS)
    let_go(at)
    return status
