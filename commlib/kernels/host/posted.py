"""Messages of a channel between nodes, each ONE compiled call without the GIL: put one, take one, hand one back.

They are persistent messages of a library (see `requests`). What goes like the one before in its slot is done here:
of the same shape, with room for it. Everything else is Python's, which is told by OTHER: nothing has been done then,
but that a message may have come. Fields, and rows of slots, are the constants below; the first ones are a node's.
BUSY is taken by Python too, before it looks at a request: MPI allows one thread at a time to do so (see `p2p.turn`).
"""

from __future__ import annotations

from typing import Any

import numba as nb

from commlib.kernels.host import arrays, channel, requests
from commlib.kernels.host import intrinsics as ins
from commlib.kernels.host.arrays import int32, table
from commlib.kernels.host.channel import COUNT, DEPTH, HALTED, SLOT, SPEC, enter, is_as_agreed, leave
from commlib.kernels.host.compiled import kernel
from commlib.kernels.host.waiting import SAMPLE, late, now

PYTHONS = 2  # BUSY while it is Python's turn
LAGS = 1  # returned beside `channel.DONE`, `OTHER` and slots: a message was put that has not left yet
LARGE_BYTES = 32 << 10  # so large a message may need its receiver's help to come

# Further fields of an end. POSTED messages are awaited, the next one in the slot RING[FIRST].
(
    START,  # addresses of functions
    TEST,
    FLAG,  # address of an int32
    STATUS,  # address of memory for a status
    ROWS,  # address of the first slot's row
    RING,
    FIRST,
    POSTED,
    POLLS,
    POSTED_FIELDS,
) = range(channel.END_FIELDS, channel.END_FIELDS + 10)

# Fields of a slot's row. KNOWN: from WHAT on, the head of the last message that was here, whose payload of NBYTES began
# at DATA; LIKE is false if its like is Python's. HELD: the number of the message that was received here and not handed
# back, or 0. LENGTH: the bytes of the payload that comes, once Python has seen it, else -1.
HANDLE, HEAD, DATA, NBYTES, ROOM, LIKE, HELD, LENGTH, KNOWN = range(9)

# The head of a message: its number, its kind (0: an array) times KIND plus its dimensions, and its length in each of
# these. The payload is next: a network sends few bytes faster.
NUMBER, WHAT, LENGTHS = range(3)
KIND, MOST_DIMENSIONS = 256, 12
HEAD_FIELDS = LENGTHS + MOST_DIMENSIONS
ROW_FIELDS = KNOWN + HEAD_FIELDS - WHAT


@nb.njit(inline="always")  # type: ignore[untyped-decorator]
def _row(end: Any, slot: int) -> Any:
    return table(end[ROWS] + 8 * ROW_FIELDS * slot, ROW_FIELDS)


@nb.njit(inline="always")  # type: ignore[untyped-decorator]
def _start(end: Any, row: Any) -> Any:
    """Start a slot's message; False if the library refuses."""
    return requests.start(end[START], 1, row[HANDLE]) == 0


@nb.njit(inline="always")  # type: ignore[untyped-decorator]
def _is_idle(end: Any, row: Any) -> Any:
    """Return whether a slot's message is complete. If the library refuses to say so, Python asks again."""
    code = requests.test(end[TEST], 1, row[HANDLE], end[FLAG], end[STATUS])
    return code == 0 and int32(end[FLAG]) != 0


@kernel(nogil=True)
def put(address: int, array: int) -> int:
    """Send a numpy array, given by its `id`: DONE, LAGS or OTHER."""
    end = table(address, POSTED_FIELDS)
    if end[HALTED] != 0 or not enter(address):
        return channel.OTHER
    row = _row(end, end[SLOT])
    status = channel.OTHER
    if row[LIKE] == end[SPEC] and is_as_agreed(end, array) and _is_idle(end, row):
        source = ins.load_acquire(array + arrays.DATA)
        if source != row[DATA]:
            ins.memcpy(row[DATA], source, end[channel.NBYTES])
        head = table(row[HEAD], HEAD_FIELDS)
        before = head[NUMBER]
        head[NUMBER] = end[COUNT] + 1
        if _start(end, row):
            end[COUNT] += 1
            end[SLOT] = 0 if end[SLOT] + 1 == end[DEPTH] else end[SLOT] + 1
            status = channel.DONE if _is_idle(end, row) else LAGS
        else:
            head[NUMBER] = before
    leave(address)
    return status


@kernel(nogil=True)
def free_slot(address: int) -> int:
    """Return the slot of the next message, if it is free and as the message before in it; else OTHER."""
    end = table(address, POSTED_FIELDS)
    if end[HALTED] != 0 or not enter(address):
        return channel.OTHER
    row = _row(end, end[SLOT])
    status = end[SLOT] if row[LIKE] == end[SPEC] and _is_idle(end, row) else channel.OTHER
    leave(address)
    return status


@nb.njit(inline="always")  # type: ignore[untyped-decorator]
def _is_expected(end: Any, row: Any) -> Any:
    """Return whether what has come is the next message, and like the one before in its slot."""
    head = table(row[HEAD], HEAD_FIELDS)
    if head[NUMBER] != end[COUNT] + 1 or head[WHAT] > MOST_DIMENSIONS:
        return False
    for field in range(WHAT, LENGTHS + head[WHAT]):  # noqa: SIM110  numba has no generators
        if head[field] != row[KNOWN + field - WHAT]:
            return False
    return True


@kernel(nogil=True)
def take(address: int) -> int:
    """Take the next message if it comes soon, and return its slot, plus DEPTH if it is a large one; else OTHER."""
    end = table(address, POSTED_FIELDS)
    if end[HALTED] != 0 or end[POSTED] == 0 or not enter(address):
        return channel.OTHER
    slot = table(end[RING], end[DEPTH])[end[FIRST]]
    row = _row(end, slot)
    has_come, polls = False, 0
    while row[LIKE] != 0 and not has_come and polls <= end[POLLS]:
        if polls % SAMPLE:
            has_come = _is_idle(end, row)
        else:
            began = now()
            has_come = _is_idle(end, row)
            polls += SAMPLE * late(began)
        polls += 1
    status = channel.OTHER
    if has_come and _is_expected(end, row):
        end[FIRST] = 0 if end[FIRST] + 1 == end[DEPTH] else end[FIRST] + 1
        end[POSTED] -= 1
        end[COUNT] += 1
        row[HELD] = end[COUNT]
        status = slot if row[NBYTES] < LARGE_BYTES else slot + end[DEPTH]
    leave(address)
    return status


@nb.njit(inline="always")  # type: ignore[untyped-decorator]
def _post(end: Any, slot: int) -> Any:
    """Let a slot receive a message again; False if the library refuses."""
    row = _row(end, slot)
    if not _start(end, row):
        return False
    row[HELD], row[LENGTH] = 0, -1
    table(end[RING], end[DEPTH])[(end[FIRST] + end[POSTED]) % end[DEPTH]] = slot
    end[POSTED] += 1
    return True


@nb.njit(inline="always")  # type: ignore[untyped-decorator]
def _longest_held(end: Any) -> Any:
    """Return the slot that was taken first of those that are held; -1 if there is none."""
    found, least = -1, 0
    for slot in range(end[DEPTH]):
        held = _row(end, slot)[HELD]
        if held != 0 and (found < 0 or held < least):
            found, least = slot, held
    return found


@kernel(nogil=True)
def hand_back(address: int, array: int) -> int:
    """Hand back the slot in which a numpy array, given by its `id`, lies; 0: all that are held. DONE, or OTHER."""
    end = table(address, POSTED_FIELDS)
    if end[HALTED] != 0 or not enter(address):
        return channel.OTHER
    status = channel.OTHER
    if array == 0:
        status = channel.DONE
        slot = _longest_held(end)
        while slot >= 0 and status == channel.DONE:
            if not _post(end, slot):
                status = channel.OTHER
            slot = _longest_held(end)
    else:
        data = ins.load_acquire(array + arrays.DATA)
        for slot in range(end[DEPTH]):
            row = _row(end, slot)
            if row[HELD] != 0 and row[HEAD] <= data < row[HEAD] + row[ROOM] and _post(end, slot):
                status = channel.DONE
                break
    leave(address)
    return status


@kernel(nogil=True)
def take_turn(address: int) -> int:
    """Take BUSY for Python; return 0 if a compiled function has it. It may be Python's already."""
    return 1 if arrays.exchange_if(address + 8 * channel.BUSY, 0, PYTHONS) in (0, PYTHONS) else 0
