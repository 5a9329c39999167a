"""ShmRing: messages from one rank to another on a node, in a ring of shared memory. Its layout and its ends.

The ring consists of units of 64 bytes. A message takes consecutive units: a header of 32 bytes, then its payload. A
long message has only a header in the ring, and its payload takes another path. The sender writes the MARK of the header
last, with release order; the receiver reads it with acquire order, and then the rest. Every free unit begins with 0,
which means that there is no message. The receiver clears units before it publishes how many it has freed. A small
message is thus one cache line, which one rank writes and the other reads.

A full ring is followed by a larger one in new memory, which the first ring names. A sender therefore never waits for a
busy receiver, and keeps no unsent data.

The arguments of a kernel are in one int64 array, the *end* of its rank, with the fields of `fields.shm_ring`. `BUSY`
is taken atomically, for no longer than the copy of a message. Threads, and signal handlers, which run only between two
calls, therefore never see a partial message.
"""

from __future__ import annotations

from typing import Any

import numba as nb

from commlib.kernels.fields.shm_ring import (
    BUSY,
    DONE,
    END_FIELDS,
    HALTED,
    HEAD_FIELDS,
    LINK_AT,
    MEMORY,
    NAP_MICROSECONDS,
    NAPS,
    NEXT_AT,
    NOTE,
    NOTES,
    OTHER,
    POSITION,
    RING,
    RING_AT,
    SEEN,
    SPINS,
    UNIT,
    UNITS,
    YIELDS,
    units_of_bytes,
)
from commlib.kernels.host import arrays
from commlib.kernels.host import intrinsics as ins
from commlib.kernels.host.arrays import table
from commlib.kernels.host.compilation import kernel
from commlib.kernels.host.waiting import pause

units_of = nb.njit(inline="always")(units_of_bytes)


@nb.njit(inline="always")  # type: ignore[untyped-decorator]
def claim(at: int) -> None:
    """Take BUSY, which is only held for a short time."""
    while arrays.exchange(at + 8 * BUSY, 1) != 0:
        ins.sched_yield()


@nb.njit(inline="always")  # type: ignore[untyped-decorator]
def let_go(at: int) -> None:
    """Release BUSY."""
    ins.store_release(at + 8 * BUSY, 0)


@nb.njit(inline="always")  # type: ignore[untyped-decorator]
def head_at(address: int) -> Any:
    """Return the header of the message at an address."""
    return table(address, HEAD_FIELDS)


@nb.njit(inline="always")  # type: ignore[untyped-decorator]
def unit_at(end: Any, place: int) -> Any:
    """Return the address of a unit of the ring."""
    return end[MEMORY] + RING_AT + place * UNIT


@nb.njit(inline="always")  # type: ignore[untyped-decorator]
def note_at(end: Any, at: int, array: int) -> Any:
    """Return the address of the note of a call with this array."""
    return at + 8 * (NOTE + (array >> 5) % NOTES)


@kernel(nogil=True)
def pause_at(end: Any, polls: int) -> Any:
    """Pause between two polls: see `waiting.pause`."""
    return pause(polls, end[SPINS], end[YIELDS], end[NAPS], end[NAP_MICROSECONDS])


@kernel(nogil=True)
def follow_ring(at: int, ring: int, memory: int, units: int, link: int, nbytes: int) -> int:
    """Switch from the ring with this number to the next one, and leave a text with its location. OTHER if already done.

    Without a text: switch to the first ring if `ring` is 0; or, as a receiver, to the next one.
    """
    end = table(at, END_FIELDS)
    claim(at)
    status = OTHER
    if end[RING] == ring:
        before = end[MEMORY]
        if nbytes > 0:
            ins.memcpy(before + LINK_AT, link, nbytes)
            ins.store_release(before + NEXT_AT, 1)
        end[MEMORY], end[UNITS], end[POSITION], end[SEEN], end[RING] = memory, units, 0, 0, ring + 1
        status = DONE
    let_go(at)
    return status


@kernel(nogil=True)
def has_moved(at: int, array: int) -> int:
    """Return 1 if the last call with this array has moved a message, else 0. Must be called before any other call."""
    return 1 if ins.load_acquire(note_at(table(at, END_FIELDS), at, array)) == array else 0


@kernel(nogil=True)
def halt(at: int, yes: int) -> int:
    """Make `put` and `take` return STOPPED, or revoke that."""
    ins.store_release(at + 8 * HALTED, yes)
    return DONE
