"""Messages of a channel between nodes: put, take and release a message in one compiled call each, without the GIL.

Messages are persistent requests of a library (see `requests`). Compiled code handles a message that fits its slot and
has the shape of the slot's previous message. Python handles all others, after OTHER, which means that nothing was done,
except that a message may have arrived. `fields.network_channel` has the fields, and those of the rows of slots; the
first fields are those of a channel within a node. Python also takes BUSY before it tests a request, because MPI lets
one thread at a time do so (see `p2p.channels.posted_end`).
"""

from __future__ import annotations

from typing import Any

import numba as nb

from commlib.kernels.fields import arrays as arrays_fields
from commlib.kernels.fields import channel as channel_fields
from commlib.kernels.fields.channel import (
    COUNT,
    DEPTH,
    HALTED,
    SLOT,
    SPEC,
)
from commlib.kernels.fields.network_channel import (
    DATA,
    FIRST,
    FLAG,
    HANDLE,
    HEAD,
    HEAD_FIELDS,
    HELD,
    KNOWN,
    LAGS,
    LARGE_BYTES,
    LENGTH,
    LENGTHS,
    LIKE,
    MOST_DIMENSIONS,
    NBYTES,
    NUMBER,
    POLLS,
    POSTED,
    POSTED_FIELDS,
    PYTHONS,
    RING,
    ROOM,
    ROW_FIELDS,
    ROWS,
    START,
    STATUS,
    TEST,
    WHAT,
)
from commlib.kernels.host import arrays, requests
from commlib.kernels.host import intrinsics as ins
from commlib.kernels.host.arrays import int32, table
from commlib.kernels.host.channel import (
    enter,
    is_as_agreed,
    leave,
)
from commlib.kernels.host.compilation import kernel
from commlib.kernels.host.waiting import SAMPLE, count_late_polls, now


@nb.njit(inline="always")  # type: ignore[untyped-decorator]
def _row(end: Any, slot: int) -> Any:
    return table(end[ROWS] + 8 * ROW_FIELDS * slot, ROW_FIELDS)


@nb.njit(inline="always")  # type: ignore[untyped-decorator]
def _start(end: Any, row: Any) -> Any:
    """Start a slot's message; return False if the library fails."""
    return requests.start(end[START], 1, row[HANDLE]) == 0


@nb.njit(inline="always")  # type: ignore[untyped-decorator]
def _is_idle(end: Any, row: Any) -> Any:
    """Return whether a slot's message is complete. If the library fails, Python tests it again."""
    code = requests.test(end[TEST], 1, row[HANDLE], end[FLAG], end[STATUS])
    return code == 0 and int32(end[FLAG]) != 0


@kernel(nogil=True)
def put(address: int, array: int) -> int:
    """Send a numpy array, given by its `id`: DONE, LAGS or OTHER."""
    end = table(address, POSTED_FIELDS)
    if end[HALTED] != 0 or not enter(address):
        return channel_fields.OTHER
    row = _row(end, end[SLOT])
    status = channel_fields.OTHER
    if row[LIKE] == end[SPEC] and is_as_agreed(end, array) and _is_idle(end, row):
        source = ins.load_acquire(array + arrays_fields.DATA)
        if source != row[DATA]:
            ins.memcpy(row[DATA], source, end[channel_fields.NBYTES])
        head = table(row[HEAD], HEAD_FIELDS)
        before = head[NUMBER]
        head[NUMBER] = end[COUNT] + 1
        if _start(end, row):
            end[COUNT] += 1
            end[SLOT] = 0 if end[SLOT] + 1 == end[DEPTH] else end[SLOT] + 1
            status = channel_fields.DONE if _is_idle(end, row) else LAGS
        else:
            head[NUMBER] = before
    leave(address)
    return status


@kernel(nogil=True)
def free_slot(address: int) -> int:
    """Return the slot of the next message if it is free and fits the slot's previous message; else OTHER."""
    end = table(address, POSTED_FIELDS)
    if end[HALTED] != 0 or not enter(address):
        return channel_fields.OTHER
    row = _row(end, end[SLOT])
    status = end[SLOT] if row[LIKE] == end[SPEC] and _is_idle(end, row) else channel_fields.OTHER
    leave(address)
    return status


@nb.njit(inline="always")  # type: ignore[untyped-decorator]
def _is_expected(end: Any, row: Any) -> Any:
    """Return whether the arrived message is the next one, and is like the previous one in its slot."""
    head = table(row[HEAD], HEAD_FIELDS)
    if head[NUMBER] != end[COUNT] + 1 or head[WHAT] > MOST_DIMENSIONS:
        return False
    for field in range(WHAT, LENGTHS + head[WHAT]):  # noqa: SIM110  numba has no generators
        if head[field] != row[KNOWN + field - WHAT]:
            return False
    return True


@kernel(nogil=True)
def take(address: int) -> int:
    """Take the next message if it arrives soon, and return its slot, plus DEPTH if it is large; else OTHER."""
    end = table(address, POSTED_FIELDS)
    if end[HALTED] != 0 or end[POSTED] == 0 or not enter(address):
        return channel_fields.OTHER
    slot = table(end[RING], end[DEPTH])[end[FIRST]]
    row = _row(end, slot)
    has_arrived, polls = False, 0
    while row[LIKE] != 0 and not has_arrived and polls <= end[POLLS]:
        if polls % SAMPLE:
            has_arrived = _is_idle(end, row)
        else:
            began = now()
            has_arrived = _is_idle(end, row)
            polls += SAMPLE * count_late_polls(began)
        polls += 1
    status = channel_fields.OTHER
    if has_arrived and _is_expected(end, row):
        end[FIRST] = 0 if end[FIRST] + 1 == end[DEPTH] else end[FIRST] + 1
        end[POSTED] -= 1
        end[COUNT] += 1
        row[HELD] = end[COUNT]
        status = slot if row[NBYTES] < LARGE_BYTES else slot + end[DEPTH]
    leave(address)
    return status


@nb.njit(inline="always")  # type: ignore[untyped-decorator]
def _post(end: Any, slot: int) -> Any:
    """Post a receive for a slot again; return False if the library fails."""
    row = _row(end, slot)
    if not _start(end, row):
        return False
    row[HELD], row[LENGTH] = 0, -1
    table(end[RING], end[DEPTH])[(end[FIRST] + end[POSTED]) % end[DEPTH]] = slot
    end[POSTED] += 1
    return True


@nb.njit(inline="always")  # type: ignore[untyped-decorator]
def _longest_held(end: Any) -> Any:
    """Return the held slot that was taken first; -1 if none is held."""
    longest, least = -1, 0
    for slot in range(end[DEPTH]):
        held = _row(end, slot)[HELD]
        if held != 0 and (longest < 0 or held < least):
            longest, least = slot, held
    return longest


@kernel(nogil=True)
def release(address: int, array: int) -> int:
    """Release the slot that contains a numpy array, given by its `id`; 0 releases all held slots. DONE or OTHER."""
    end = table(address, POSTED_FIELDS)
    if end[HALTED] != 0 or not enter(address):
        return channel_fields.OTHER
    status = channel_fields.OTHER
    if array == 0:
        status = channel_fields.DONE
        slot = _longest_held(end)
        while slot >= 0 and status == channel_fields.DONE:
            if not _post(end, slot):
                status = channel_fields.OTHER
            slot = _longest_held(end)
    else:
        data = ins.load_acquire(array + arrays_fields.DATA)
        for slot in range(end[DEPTH]):
            row = _row(end, slot)
            if row[HELD] != 0 and row[HEAD] <= data < row[HEAD] + row[ROOM] and _post(end, slot):
                status = channel_fields.DONE
                break
    leave(address)
    return status


@kernel(nogil=True)
def take_turn(address: int) -> int:
    """Take BUSY for Python; return 0 if a compiled function holds it. Python may hold it already."""
    return 1 if arrays.exchange_if(address + 8 * channel_fields.BUSY, 0, PYTHONS) in (0, PYTHONS) else 0
