"""Fields of a ring of messages in shared memory: its memory, headers of messages, and the end of a rank."""

from __future__ import annotations

# Status codes: done; long wait; the end is halted; Python must handle it; no space.
DONE, WAITING, STOPPED, OTHER, FULL = 0, -1, -2, -3, -4
DRAINED = 1  # another ring follows

# A ring's memory: number of units that the receiver has freed; whether another ring follows; whether the receiver has
# found it; a text with the location of the next ring. Each has one writer, and a separate cache line.
FREED_AT, NEXT_AT, OPENED_AT, LINK_AT, LINK_BYTES, RING_AT = 0, 128, 256, 512, 1024, 4096

UNIT = 64

# A message's header: its mark, tag and bytes, and the number of a message that takes another path.
MARK, MESSAGE_TAG, NBYTES, WAY_NUMBER, HEAD_FIELDS = range(5)

HEAD_BYTES = 8 * HEAD_FIELDS

HERE, ELSEWHERE, NOTHING = 1, 2, 3  # marks: the payload follows; it takes another path; no message, but NBYTES units

MOST_TAGS = 32768

# Number of consecutive calls, identified by their arrays, that record whether they have moved their message.
NOTES = 64

# Fields of an end.
(
    MEMORY,  # address of the ring's memory
    UNITS,  # in the ring
    POSITION,  # number of units that this end has written, or freed
    SEEN,  # sender only: units that the receiver had freed at the last check
    RING,  # number of the ring, from 1; 0 before the first ring
    BUSY,
    HALTED,
    SPINS,  # polls before the first yield
    YIELDS,  # yields before the first nap
    NAPS,  # naps before WAITING is returned
    NAP_MICROSECONDS,
    DTYPES,  # see `arrays.plain_bytes`
    LONGEST,  # sender only: bytes of the longest message for the ring
    ELSEWHERE_SENT,  # sender only: number of messages that took another path
    ASIDE,  # receiver only: see `lane_aside`
    ASIDE_UNITS,
    ASIDE_FIRST,
    ASIDE_LAST,
    ASIDE_NUMBER,
    POSTS,  # receiver only: see `lane_posts`
    POSTS_ROOM,
    POSTS_HIGH,
    POSTS_WAITING,
    POSTED,
    NOTE,  # the first of NOTES
) = range(25)

END_FIELDS = NOTE + NOTES


def units_of_bytes(nbytes: int) -> int:
    """Return the number of units of a message with `nbytes` bytes."""
    return (HEAD_BYTES + nbytes + UNIT - 1) // UNIT
