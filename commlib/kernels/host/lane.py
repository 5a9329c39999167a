"""A lane: messages of one rank to another on a node, in a ring of shared memory. Here: its layout, and its two ends.

The ring consists of units of 64 bytes. A message takes as many as it needs, one after the other: a head of 32 bytes,
then its own. One that is long has only a head here, and goes another way. The sender writes the MARK of the head last,
with release order; the receiver reads it with acquire order, and then the rest. Every free unit begins with 0, so there
is no message where none has been written: the receiver sees to that as it frees units, before it says how many it has
freed. So a small message is one cache line, which one rank writes and the other reads.

A ring that is full is followed by a larger one, in memory of its own, which the first one names: a sender need not wait
for a receiver that does something else, and nothing of what it has sent is left with it.

What a kernel needs is in one int64 array, the *end* of its rank, whose fields are the constants below. `BUSY` is taken
atomically, and never for longer than a message is copied. So threads, and signal handlers, which come only between two
calls, never see half a message.
"""

from __future__ import annotations

from typing import Any

import numba as nb

from commlib.kernels.host import arrays
from commlib.kernels.host import intrinsics as ins
from commlib.kernels.host.arrays import table
from commlib.kernels.host.compiled import kernel
from commlib.kernels.host.waiting import pause

# What kernels return: done; it takes long; the end is halted; Python must do it; there is no room.
DONE, WAITING, STOPPED, OTHER, FULL = 0, -1, -2, -3, -4

# A ring's memory: how many units its receiver has freed; whether another ring follows; whether its receiver has found
# it; the text that says where the next one is. Each is written by one rank, in a line of its own.
FREED_AT, NEXT_AT, FOUND_AT, LINK_AT, LINK_BYTES, RING_AT = 0, 128, 256, 512, 1024, 4096

UNIT = 64

# A message's head: its mark, tag and bytes, and the number of one that goes another way.
MARK, MESSAGE_TAG, NBYTES, WAY_NUMBER, HEAD_FIELDS = range(5)
HEAD_BYTES = 8 * HEAD_FIELDS
HERE, ELSEWHERE, NOTHING = 1, 2, 3  # marks: the bytes follow; they go another way; no message, but NBYTES units

MOST_TAGS = 32768

# So many calls in a row, told by their arrays, leave a note of whether they have moved their message.
NOTES = 64

# Fields of an end.
(
    MEMORY,  # address of the ring's memory
    UNITS,  # in the ring
    POSITION,  # units that this end has written, or freed
    SEEN,  # of the sender's: units that the receiver had freed when last looked at
    RING,  # its number: the first is 1, and 0 until there is one
    BUSY,
    HALTED,
    SPINS,  # polls before the first yield
    YIELDS,  # yields before the first nap
    NAPS,  # naps before WAITING is returned
    NAP_MICROSECONDS,
    DTYPES,  # see `arrays.plain_bytes`
    LONGEST,  # of the sender's: bytes of the longest message that goes in here
    ELSEWHERE_SENT,  # of the sender's: how many messages have gone another way
    ASIDE,  # of the receiver's: see `lane_aside`
    ASIDE_UNITS,
    ASIDE_FIRST,
    ASIDE_LAST,
    ASIDE_NUMBER,
    POSTS,  # of the receiver's: see `lane_posts`
    POSTS_ROOM,
    POSTS_HIGH,
    POSTS_WAITING,
    POSTED,
    NOTE,  # the first of NOTES
) = range(25)
END_FIELDS = NOTE + NOTES


@nb.njit(inline="always")  # type: ignore[untyped-decorator]
def claim(at: int) -> None:
    """Take BUSY; whoever has it lets go of it soon."""
    while arrays.exchange(at + 8 * BUSY, 1) != 0:
        ins.sched_yield()


@nb.njit(inline="always")  # type: ignore[untyped-decorator]
def let_go(at: int) -> None:
    """Let go of BUSY."""
    ins.store_release(at + 8 * BUSY, 0)


@nb.njit(inline="always")  # type: ignore[untyped-decorator]
def units_of(nbytes: int) -> Any:
    """Return how many units a message of so many bytes takes."""
    return (HEAD_BYTES + nbytes + UNIT - 1) // UNIT


@nb.njit(inline="always")  # type: ignore[untyped-decorator]
def head_at(address: int) -> Any:
    """Return the head of the message at an address."""
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
    """Let time pass between two polls: see `waiting.pause`."""
    return pause(polls, end[SPINS], end[YIELDS], end[NAPS], end[NAP_MICROSECONDS])


@kernel(nogil=True)
def go_on(at: int, ring: int, memory: int, units: int, link: int, nbytes: int) -> int:
    """Let the ring with this number be followed by another one, which a text describes. OTHER if one follows already.

    Without a text: begin with the first one, where `ring` is 0; or, as a receiver, with the next.
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
    """Return 1 if the last call with this array has moved a message, else 0. To be asked before any other call."""
    return 1 if ins.load_acquire(note_at(table(at, END_FIELDS), at, array)) == array else 0


@kernel(nogil=True)
def halt(at: int, yes: int) -> int:
    """Let `put` and `take` return STOPPED, or no more."""
    ins.store_release(at + 8 * HALTED, yes)
    return DONE
