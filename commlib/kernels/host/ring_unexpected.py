"""Unexpected messages: store messages that arrive before their receive is posted, in order, at the receiver of a ring.

A message without a receive therefore does not block the ring. Stored messages have the layout of the ring, in
receiver-private memory, from ASIDE_FIRST to ASIDE_LAST of ASIDE_UNITS units. Dropped messages are marked NOTHING.
"""

from __future__ import annotations

from typing import Any

import numba as nb

from commlib.kernels.fields.shm_ring import (
    ASIDE,
    ASIDE_FIRST,
    ASIDE_LAST,
    ASIDE_NUMBER,
    ASIDE_UNITS,
    DONE,
    END_FIELDS,
    HERE,
    MARK,
    MESSAGE_TAG,
    NBYTES,
    NOTHING,
    OTHER,
    UNIT,
)
from commlib.kernels.host import intrinsics as ins
from commlib.kernels.host.arrays import table
from commlib.kernels.host.compilation import kernel
from commlib.kernels.host.shm_ring import (
    claim,
    head_at,
    let_go,
    units_of,
)


@nb.njit(inline="always")  # type: ignore[untyped-decorator]
def length_of(head: Any) -> Any:
    """Return the number of units of a message in place."""
    return units_of(head[NBYTES]) if head[MARK] == HERE else head[NBYTES] if head[MARK] == NOTHING else 1


@nb.njit(inline="always")  # type: ignore[untyped-decorator]
def _place_at(end: Any, place: int) -> Any:
    return end[ASIDE] + place * UNIT


@kernel(nogil=True)
def store_unexpected(end: Any, at: int, units: int) -> bool:
    """Store the message at an address; return False if there is no space."""
    if end[ASIDE_LAST] + units > end[ASIDE_UNITS]:
        return False
    ins.memcpy(_place_at(end, end[ASIDE_LAST]), at, units * UNIT)
    end[ASIDE_LAST] += units
    return True


@kernel(nogil=True)
def find_unexpected(end: Any, tag: int) -> int:
    """Return the address of the oldest stored message with this tag, or 0."""
    place = end[ASIDE_FIRST]
    while place < end[ASIDE_LAST]:
        head = head_at(_place_at(end, place))
        if head[MARK] != NOTHING and head[MESSAGE_TAG] == tag:
            return _place_at(end, place)
        place += length_of(head)
    return 0


@kernel(nogil=True)
def drop_unexpected(end: Any, at: int) -> None:
    """Drop the stored message at an address."""
    head = head_at(at)
    head[NBYTES] = length_of(head)
    head[MARK] = NOTHING
    while end[ASIDE_FIRST] < end[ASIDE_LAST]:
        first = head_at(_place_at(end, end[ASIDE_FIRST]))
        if first[MARK] != NOTHING:
            return
        end[ASIDE_FIRST] += first[NBYTES]
    end[ASIDE_FIRST] = end[ASIDE_LAST] = 0


@kernel(nogil=True)
def _live_units(end: Any) -> int:
    units, place = 0, end[ASIDE_FIRST]
    while place < end[ASIDE_LAST]:
        head = head_at(_place_at(end, place))
        units += 0 if head[MARK] == NOTHING else length_of(head)
        place += length_of(head)
    return units


@kernel(nogil=True)
def move_unexpected(at: int, number: int, memory: int, units: int) -> int:
    """Move the stored messages to other memory, if the current memory has this number and they fit: DONE or OTHER."""
    end = table(at, END_FIELDS)
    claim(at)
    status = OTHER
    if end[ASIDE_NUMBER] == number and _live_units(end) <= units:
        used, place = 0, end[ASIDE_FIRST]
        while place < end[ASIDE_LAST]:
            head = head_at(_place_at(end, place))
            length = length_of(head)
            if head[MARK] != NOTHING:
                ins.memcpy(memory + used * UNIT, _place_at(end, place), length * UNIT)
                used += length
            place += length
        end[ASIDE], end[ASIDE_UNITS], end[ASIDE_FIRST], end[ASIDE_LAST] = memory, units, 0, used
        end[ASIDE_NUMBER] = number + 1
        status = DONE
    let_go(at)
    return status


@kernel(nogil=True)
def unexpected_units(at: int) -> int:
    """Return the number of units of the stored messages."""
    claim(at)
    units = _live_units(table(at, END_FIELDS))
    let_go(at)
    return units
